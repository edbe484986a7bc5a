// A simulated CUDA device: memory that the host cannot touch, streams that run late, and clocks that
// know which accesses are ordered. No kernels here; kernels.cpp and collectives.cpp queue on this.
//
// Locks: one mutex guards queues, clocks and the allocator. Work runs without it. Python's lock is
// never asked for while it is held, so that a kernel or a report may need Python's.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simgpu {
constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr size_t kSpanBytes = size_t(1) << 36;  // addresses of one device
constexpr int kPoolStreams = 32;                // per device, as CUDA's pool

long setting(const char* name, long otherwise);
std::string setting(const char* name, const char* otherwise);

// ---- places and clocks (clocks.cpp) ----------------------------------------------------------
struct Site {                  // where something was launched; resolved to text only for a report
  const char* operation = "";  // interned
  const char* node = nullptr;  // backward node, where a thread of autograd launched it
  void* code = nullptr;        // code object of the nearest frame of the user
  int instruction = 0;
};
const char* intern(const std::string&);
Site site_here(const char* operation);  // takes Python's lock; never under the mutex
std::string text_of(const Site&);       // likewise

using Clock = std::vector<uint64_t>;  // by actor: how much of its work is known to be over
void join(Clock& into, const Clock& from);
inline uint64_t known(const Clock& c, size_t actor) { return actor < c.size() ? c[actor] : 0; }

struct Stream;
struct Access { uint32_t actor = 0; uint64_t number = 0; bool writes = false; Site site; };
struct Conflict { Access earlier; Access later; uintptr_t address; bool reused; };
struct Range { uintptr_t begin, end; bool writes; };

// Both under the mutex; the launch itself is counted by `launched`.
void launched(Stream*);
void touch(Stream*, const Range&, const Site&, std::vector<Conflict>&);
void handed_out(Stream*, uintptr_t begin, uintptr_t end, const Site&);
void forget(uintptr_t begin, uintptr_t end);
void forget_before(uintptr_t begin, uintptr_t end, uint32_t actor, uint64_t number);
bool last_write(uintptr_t address, Access&);
Clock& host_clock();
// Raises, reports or ignores, as SIM_RACES says; without the mutex.
void tell(const std::vector<Conflict>&);
void tell_later(const std::string& text);  // from where nothing can be raised: at the next launch
void raise_what_waits();

// ---- streams (streams.cpp) --------------------------------------------------------------------
struct Task {
  std::function<void()> run;   // nullptr: it only waits
  std::function<bool()> poll;  // of work that goes on by itself: is it over?
  Stream* after = nullptr;     // begins when after->done >= upto
  uint64_t upto = 0;
  bool kernel = false;         // counted by `sim_launches`
  bool started = false;
};
struct Stream {
  c10::DeviceIndex device;
  c10::StreamId id;
  uint32_t actor;
  std::deque<Task> queue;
  uint64_t queued = 0, done = 0;
  bool running = false;
  uint64_t rank = 0;  // the schedule's preference of the moment
  Clock clock;
};
using Lock = std::unique_lock<std::mutex>;
std::mutex& mutex();

int device_count();
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex);
Stream* current_stream(c10::DeviceIndex = -1);
void set_stream(Stream*);
Stream* stream_of(const c10::Stream&);
c10::Stream handle_of(Stream*);
Stream* pool_stream(c10::DeviceIndex);

void queue(Stream*, Task, Lock&);               // under the mutex
void push(Stream*, Task);                       // queue, then what the schedule says
void push_async(Stream*, Task);                 // as push; an eager schedule starts it and goes on
void order(Stream* waits, Stream* after);       // waits comes after all that `after` was given
void run_until(Stream*, uint64_t upto);         // the simulator waits, the program learns nothing
void host_waits(Stream*, uint64_t upto, const Clock&);  // the program waits
void host_waits(Stream*);
void host_waits_device(c10::DeviceIndex);
bool host_asks(Stream*, uint64_t upto, const Clock&);
void count_launch(bool begun);  // a kernel whose launch returned: had it begun by then?
void keep_moving();  // from now on work goes on though the host asks for nothing
double now_ms();

// ---- memory (memory.cpp) -----------------------------------------------------------------------
char* to_host(const void* device_address);  // where kernels reach it; host addresses stay
int device_of(const void*);                 // -1: no address of a device
c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void*);
void pinned_queued(Stream*, const Range&, const Site&);  // the device will use pinned memory: under the mutex
void pinned_open(const Range&, bool);                    // while the simulator's own copy runs
void host_knows_more();                                  // under the mutex: let the host at what is over
}  // namespace simgpu
