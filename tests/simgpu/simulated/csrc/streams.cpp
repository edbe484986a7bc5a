// Streams, events and the schedule: when queued work runs.
//
//   eager   at once; what goes on by itself (collectives) is started and not waited for
//   lazy    only when the host waits for it, and then only what it needs: hard on forgotten waits
//   drawn   at random moments by seed, one stream preferred for a while (as PCT, Burckhardt 2010)
//
// In one process nothing runs behind the host's back, so that a seed repeats exactly; with several, a
// thread keeps work moving, since a rank may wait in host code for a rank that waits on its device.
#include "device.h"
#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <random>
#include <thread>

namespace simgpu {
long setting(const char* name, long otherwise) {
  const char* v = std::getenv(name);
  return v && *v ? std::atol(v) : otherwise;
}
std::string setting(const char* name, const char* otherwise) {
  const char* v = std::getenv(name);
  return v && *v ? v : otherwise;
}
std::mutex& mutex() { static auto* m = new std::mutex; return *m; }

namespace {
enum Mode { EAGER, LAZY, DRAWN };
Mode mode_of(const std::string& s) { return s == "eager" ? EAGER : s == "lazy" ? LAZY : DRAWN; }
Mode& mode() { static Mode m = mode_of(setting("SIM_MODE", "drawn")); return m; }
std::mt19937_64& dice() { static auto* r = new std::mt19937_64(setting("SIM_SEED", 0L)); return *r; }
std::condition_variable& moved() { static auto* c = new std::condition_variable; return *c; }
uint64_t& digest() { static uint64_t d = 0; return d; }

std::vector<std::vector<Stream*>>& streams() {
  static uint32_t actors = 0;  // 0: the host
  static auto* all = [] {
    auto* v = new std::vector<std::vector<Stream*>>(device_count());
    for (int d = 0; d < device_count(); d++)
      for (int i = 0; i <= kPoolStreams; i++)
        (*v)[d].push_back(new Stream{(c10::DeviceIndex)d, i, ++actors});
    return v;
  }();
  return *all;
}
thread_local c10::DeviceIndex here = 0;
thread_local std::vector<Stream*> chosen;

std::exception_ptr& fault() { static auto* e = new std::exception_ptr; return *e; }  // told at a sync

class WithoutPython {  // who waits must not keep Python's lock: a kernel may want it
  PyThreadState* state_;
 public:
  WithoutPython() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() { if (state_) PyEval_RestoreThread(state_); }
};

bool may_begin(const Task& t) { return !t.after || t.after->done >= t.upto; }

// Moves the head of a stream; false where it cannot move now.
bool step(Stream* s, Lock& lock) {
  if (s->running || s->queue.empty() || !may_begin(s->queue.front())) return false;
  Task& t = s->queue.front();  // a deque keeps its place while others are appended
  bool over = true, began = !t.started;
  s->running = true;
  lock.unlock();
  try {
    if (!t.started && t.run) t.run();
    t.run = nullptr;
    if (t.poll) over = t.poll();
  } catch (...) {
    lock.lock();
    if (!fault()) fault() = std::current_exception();
    lock.unlock();
    over = true;
  }
  lock.lock();
  t.started = true;
  s->running = false;
  if (!over) return began;
  s->queue.pop_front();
  s->done++;
  digest() = (digest() ^ (s->actor * 1000003ull + s->done)) * 0x100000001b3ull;
  moved().notify_all();
  return true;
}
bool step_any(Lock& lock) {
  std::vector<Stream*> ready;
  for (auto& of_device : streams())
    for (auto* s : of_device)
      if (!s->queue.empty()) ready.push_back(s);
  if (ready.empty()) return false;
  auto& r = dice();
  if (r() % 8 == 0) ready[r() % ready.size()]->rank = r() % 1000;
  std::stable_sort(ready.begin(), ready.end(), [](Stream* a, Stream* b) { return a->rank > b->rank; });
  for (auto* s : ready) if (step(s, lock)) return true;
  return false;
}
bool step_towards(Stream* s, Lock& lock, int depth = 0) {  // as little as the goal needs
  if (s->queue.empty() || depth > 64) return false;
  Task& t = s->queue.front();
  return may_begin(t) ? step(s, lock) : step_towards(t.after, lock, depth + 1);
}
void run_until(Stream* s, uint64_t upto, Lock& lock) {
  upto = std::min(upto, s->queued);
  while (s->done < upto) {
    bool any = mode() == DRAWN && dice()() % 2 ? step_any(lock) : step_towards(s, lock);
    if (!any && !step_towards(s, lock)) moved().wait_for(lock, std::chrono::microseconds(300));
  }
  if (fault()) std::rethrow_exception(std::exchange(fault(), nullptr));
}
std::atomic<uint64_t> all_launches{0}, begun_launches{0};
struct Counted {  // looks when the launch returns; made and gone under the mutex
  Stream* s;
  uint64_t number;
  bool kernel;
  bool begun() const { return s->done >= number || (s->done + 1 == number && (s->running || s->queue.front().started)); }
  ~Counted() { if (kernel) count_launch(begun()); }
};
}  // namespace

int device_count() { static int n = (int)setting("SIM_DEVICES", 2L); return n; }
c10::DeviceIndex current_device() { return here; }
void set_device(c10::DeviceIndex d) {
  TORCH_CHECK(d >= 0 && d < device_count(), "CUDA error: invalid device ordinal (simulated device ", (int)d, " of ",
              device_count(), ")");
  here = d;
}
Stream* current_stream(c10::DeviceIndex d) {
  if (d < 0) d = here;
  if (chosen.empty()) chosen.resize(device_count());
  return chosen[d] ? chosen[d] : streams()[d][0];
}
void set_stream(Stream* s) { current_stream(); chosen[s->device] = s; }
Stream* stream_of(const c10::Stream& s) {
  return streams().at(s.device_index() < 0 ? here : s.device_index()).at(s.id());
}
c10::Stream handle_of(Stream* s) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, s->device), s->id);
}
Stream* pool_stream(c10::DeviceIndex d) {
  Lock lock(mutex());
  static std::vector<int> turn(device_count());
  if (d < 0) d = here;
  return streams()[d][1 + turn[d]++ % kPoolStreams];
}
void queue(Stream* s, Task t, Lock&) {
  s->queue.push_back(std::move(t));
  s->queued++;
}
void count_launch(bool begun) { all_launches++; begun_launches += begun; }
void push_async(Stream* s, Task t) {
  WithoutPython released;
  Lock lock(mutex());
  Counted counted{s, s->queued + 1, t.kernel};
  queue(s, std::move(t), lock);
  if (mode() == EAGER) while (step_towards(s, lock) && !s->queue.empty()) {}
  if (mode() == DRAWN && dice()() % 4 == 0) step_any(lock);
}
void push(Stream* s, Task t) {
  WithoutPython released;
  Lock lock(mutex());
  Counted counted{s, s->queued + 1, t.kernel};
  queue(s, std::move(t), lock);
  if (mode() == EAGER) return run_until(s, s->queued, lock);
  if (mode() == DRAWN && dice()() % 4 == 0) step_any(lock);
  if (s->queue.size() > 4096) step(s, lock);
}
void order(Stream* waits, Stream* after) {
  uint64_t upto;
  {
    Lock lock(mutex());
    join(waits->clock, after->clock);
    upto = after->queued;
  }
  if (waits != after) push(waits, Task{nullptr, nullptr, after, upto});
}
void run_until(Stream* s, uint64_t upto) {
  WithoutPython released;
  Lock lock(mutex());
  run_until(s, upto, lock);
}
void host_waits(Stream* s, uint64_t upto, const Clock& clock) {
  {
    WithoutPython released;
    Lock lock(mutex());
    run_until(s, upto, lock);
    join(host_clock(), clock);
    host_knows_more();
  }
  raise_what_waits();
}
void host_waits(Stream* s) {
  uint64_t upto;
  Clock clock;
  {
    Lock lock(mutex());
    upto = s->queued;
    clock = s->clock;
  }
  host_waits(s, upto, clock);
}
void host_waits_device(c10::DeviceIndex d) {
  for (auto* s : streams()[d < 0 ? here : d]) host_waits(s);
}
bool host_asks(Stream* s, uint64_t upto, const Clock& clock) {
  WithoutPython released;
  Lock lock(mutex());
  if (s->done < upto) mode() == LAZY ? step_towards(s, lock) : step_any(lock);
  if (s->done < upto) return false;
  join(host_clock(), clock);
  host_knows_more();
  return true;
}
void keep_moving() {
  static std::once_flag once;
  std::call_once(once, [] {
    std::thread([] {
      for (auto pause = std::chrono::milliseconds(setting("SIM_TICK_MS", 5L));;) {
        std::this_thread::sleep_for(pause);
        Lock lock(mutex());
        for (int i = 0; i < 4 && step_any(lock); i++) {}
      }
    }).detach();
  });
}
double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
extern "C" void sim_seed(long seed) {
  Lock lock(mutex());
  dice().seed(seed);
  digest() = 0;
  for (auto& of_device : streams()) for (auto* s : of_device) s->rank = 0;
}
extern "C" void sim_mode(const char* name) { Lock lock(mutex()); mode() = mode_of(name); }
extern "C" uint64_t sim_launches(bool begun) { return begun ? begun_launches : all_launches; }
extern "C" uint64_t sim_digest() { return digest(); }  // of the order in which all work ran

// ---- what torch asks a device for --------------------------------------------------------------
namespace {
struct Event {
  Stream* stream = nullptr;
  uint64_t upto = 0;
  Clock clock;
  std::shared_ptr<double> at_ms = std::make_shared<double>(0);
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device getDevice() const override { return c10::Device(kDevice, here); }
  void setDevice(c10::Device d) const override { if (d.index() >= 0) set_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) here = d.index(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  c10::Stream getStream(c10::Device d) const override { return handle_of(current_stream(d.index())); }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return handle_of(streams()[d.index() < 0 ? here : d.index()][0]);
  }
  c10::Stream getNewStream(c10::Device d, int) const override { return handle_of(pool_stream(d.index())); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto* next = stream_of(s);
    auto before = handle_of(current_stream(next->device));
    set_stream(next);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return stream_of(s); }
  bool queryStream(const c10::Stream& handle) const override {
    auto* s = stream_of(handle);
    Lock lock(mutex());
    auto upto = s->queued;
    auto clock = s->clock;
    lock.unlock();
    return host_asks(s, upto, clock);
  }
  void synchronizeStream(const c10::Stream& s) const override { host_waits(stream_of(s)); }
  void synchronizeDevice(const c10::DeviceIndex d) const override { host_waits_device(d); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** place, const c10::Stream& handle, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*place) *place = new Event;
    auto* e = (Event*)*place;
    auto* s = stream_of(handle);
    e->at_ms = std::make_shared<double>(0);
    push(s, Task{[at = e->at_ms] { *at = now_ms(); }});
    Lock lock(mutex());
    e->stream = s;
    e->upto = s->queued;
    e->clock = s->clock;
  }
  void block(void* event, const c10::Stream& handle) const override {
    auto* e = (Event*)event;
    if (!e || !e->stream) return;  // an event that was never recorded orders nothing, as CUDA's
    auto* s = stream_of(handle);
    {
      Lock lock(mutex());
      join(s->clock, e->clock);
    }
    push(s, Task{nullptr, nullptr, e->stream, e->upto});
  }
  bool queryEvent(void* event) const override {
    auto* e = (Event*)event;
    return !e || !e->stream || host_asks(e->stream, e->upto, e->clock);
  }
  void synchronizeEvent(void* event) const override {
    auto* e = (Event*)event;
    if (e && e->stream) host_waits(e->stream, e->upto, e->clock);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    synchronizeEvent(from);
    synchronizeEvent(to);
    return *((Event*)to)->at_ms - *((Event*)from)->at_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    allocator()->recordStream(p, s);
  }
};
c10::impl::DeviceGuardImplRegistrar guard_registered(kDevice, new Guard);

struct HostTimer final : c10d::Timer {  // DDP's logger asks for one by device type
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto a = getTimestamp(start), b = getTimestamp(end);
    if (!a || !b) return std::nullopt;
    return *b - *a;
  }
};
}  // namespace
}  // namespace simgpu

namespace c10d {
using SimulatedTimer = simgpu::HostTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer)
}  // namespace c10d
