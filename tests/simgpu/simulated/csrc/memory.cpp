// Device memory, CUDA's caching allocator over it, and pinned host memory.
//
// A device's addresses are a span that nobody may touch; kernels use the same offset of an open one.
// Blocks as in c10/cuda/CUDACachingAllocator.cpp (torch 2.13): 512-byte sizes, segments of 2 MiB for
// small ones, 20 MiB or multiples of 2 MiB for large ones, best fit per stream, split and merged.
// With expandable_segments:True one segment per stream that grows by pages of 2 or 20 MiB; when memory
// is short, whole pages of unused blocks go back (their addresses are not used again, as CUDA's are).
// A block handed out again is poisoned (0xFF: NaN, -1) in the order of the stream that got it.
// Pinned memory that the device still reads may not be written by the host, and what it still writes
// not even be read: its pages are closed until the host has waited.
#include "device.h"
#include <Python.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <tuple>
#include <ucontext.h>
#include <unistd.h>

namespace simgpu {
namespace {
constexpr size_t kRound = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20, kLargeSegment = 20 << 20,
                 kLeastLarge = 10 << 20, kPage = 4096;

struct Span { char* closed; char* open; size_t used = 0; std::multimap<size_t, size_t> holes; };
Span& span(int d) {
  static auto* all = [] {
    auto* v = new std::vector<Span>;
    for (int i = 0; i < device_count(); i++) {
      auto map = [](int protection) {
        void* p = mmap(nullptr, kSpanBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(p != MAP_FAILED, "simulated device: no address space");
        return (char*)p;
      };
      char* closed = map(PROT_NONE);
      v->push_back({closed, map(PROT_READ | PROT_WRITE)});
    }
    return v;
  }();
  return (*all)[d];
}
bool expandable() {
  static bool on = [] {
    for (auto* name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})
      if (auto* text = getenv(name); text && strstr(text, "expandable_segments:True")) return true;
    return false;
  }();
  return on;
}
size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Block {
  c10::DeviceIndex device;
  Stream* owner;
  size_t offset, size, asked = 0;
  bool small, taken = false;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  std::set<Stream*> users;                    // record_stream
  struct Use { Stream* stream; uint64_t upto, number; };
  std::vector<Use> uses;
};
struct Order {
  bool operator()(const Block* a, const Block* b) const {
    return std::make_tuple(a->owner, a->size, a->offset) < std::make_tuple(b->owner, b->size, b->offset);
  }
};
void release(void* block);
using Stats = c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::StatArray;

struct Memory final : c10::DeviceAllocator {
  struct Of {
    std::set<Block*, Order> idle[2];  // [small]
    std::set<Block*> taken, heads;    // heads: first block of each segment
    std::vector<Block*> limbo;        // freed, still used by recorded streams
    std::map<std::pair<Stream*, bool>, std::pair<size_t, size_t>> grown;  // expandable: its end, and the furthest
    Stats stats;
    size_t limit = (size_t)setting("SIM_MEMORY_BYTES", 4L << 30);
  };
  std::vector<Of> devices = std::vector<Of>(device_count());

  static void count(StatArray& s, bool small, int64_t n) {
    for (int i : {0, small ? 1 : 2}) n >= 0 ? s[i].increase(n) : s[i].decrease(-n);
  }
  static bool split_rest(const Block* b) { return !b->taken && (b->before || b->after); }
  void idle(Of& o, Block* b, int64_t sign) {  // its statistics as an unused part of a segment
    if (!split_rest(b)) return;
    count(o.stats.inactive_split, b->small, sign);
    count(o.stats.inactive_split_bytes, b->small, sign * (int64_t)b->size);
  }
  Block* find(Of& o, Stream* s, size_t size, bool small) {
    Block key{s->device, s, 0, size, 0, small};
    auto it = o.idle[small].lower_bound(&key);
    if (it == o.idle[small].end() || (*it)->owner != s) return nullptr;
    Block* b = *it;
    o.idle[small].erase(it);
    idle(o, b, -1);
    return b;
  }
  Block* expand(Of& o, Stream* s, size_t size, bool small) {  // pages at the end of the stream's one segment
    size_t page = small ? kSmallSegment : kLargeSegment, room = up(o.limit + o.limit / 8, kLargeSegment);
    Span& sp = span(s->device);
    auto [it, first] = o.grown.try_emplace({s, small});
    auto& [end, stop] = it->second;
    if (first) {
      end = up(sp.used, kLargeSegment);
      sp.used = stop = end + room;
    }
    Block* last = nullptr;
    for (Block* b : o.heads)
      for (; b && b->owner == s && b->small == small; b = b->after)
        if (b->offset + b->size == end) last = b;
    bool free = last && !last->taken && o.idle[small].count(last);
    size_t more = up(size - (free ? last->size : 0), page);
    if (o.stats.reserved_bytes[0].current + more > o.limit) return nullptr;
    TORCH_CHECK(end + more <= stop && stop <= kSpanBytes, "simulated device: no addresses left");
    if (free) {
      idle(o, last, -1);
      o.idle[small].erase(last);
      last->size += more;
    } else {
      auto* b = new Block{s->device, s, end, more, 0, small};
      b->before = last;
      if (last) last->after = b;
      else { o.heads.insert(b); count(o.stats.segment, small, 1); }
      last = b;
    }
    end += more;
    count(o.stats.reserved_bytes, small, more);
    o.stats.num_device_alloc++;
    return last;
  }
  void give_up_pages(Of& o, bool small) {  // of unused blocks between others, whose segment falls in two
    size_t page = small ? kSmallSegment : kLargeSegment;
    std::vector<Block*> unused(o.idle[small].begin(), o.idle[small].end());
    for (Block* b : unused) {
      size_t begin = up(b->offset, page), end = (b->offset + b->size) / page * page;
      if (begin >= end || !(b->before || b->after)) continue;
      idle(o, b, -1);
      o.idle[small].erase(b);
      uintptr_t base = (uintptr_t)span(b->device).closed;
      forget(base + begin, base + end);
      madvise(span(b->device).open + begin, end - begin, MADV_DONTNEED);
      count(o.stats.reserved_bytes, small, -(int64_t)(end - begin));
      o.stats.num_device_free++;
      auto part = [&](size_t from, size_t to) { return from < to ? new Block{b->device, b->owner, from, to - from, 0, small} : nullptr; };
      Block *left = part(b->offset, begin), *right = part(end, b->offset + b->size);
      if (left) left->before = b->before;
      if (right) right->after = b->after;
      if (b->before) b->before->after = left;
      if (b->after) b->after->before = right;
      bool head = o.heads.erase(b);
      int pieces = -(int)head;
      if (head && left) { o.heads.insert(left); pieces++; }
      if (Block* next = right ? right : b->after) { o.heads.insert(next); pieces++; }
      count(o.stats.segment, small, pieces);
      for (Block* n : {left, right})
        if (n) { o.idle[small].insert(n); idle(o, n, 1); }
      delete b;
    }
  }
  Block* segment(Of& o, Stream* s, size_t size, bool small) {
    if (expandable()) return expand(o, s, size, small);
    size_t n = small ? kSmallSegment : size < kLeastLarge ? kLargeSegment : up(size, kSmallSegment);
    if (o.stats.reserved_bytes[0].current + n > o.limit) return nullptr;
    Span& sp = span(s->device);
    size_t offset = sp.used;
    auto hole = sp.holes.find(n);
    if (hole != sp.holes.end()) { offset = hole->second; sp.holes.erase(hole); }
    else { TORCH_CHECK(sp.used + n + kPage <= kSpanBytes, "simulated device: no addresses left"); sp.used += n + kPage; }
    auto* b = new Block{s->device, s, offset, n, 0, small};
    o.heads.insert(b);
    count(o.stats.segment, small, 1);
    count(o.stats.reserved_bytes, small, n);
    o.stats.num_device_alloc++;
    return b;
  }
  static uintptr_t at(const Block* b) { return (uintptr_t)span(b->device).closed + b->offset; }
  void give_up_segments(Of& o) {  // what no block is taken of
    for (auto it = o.heads.begin(); it != o.heads.end();) {
      Block* b = *it;
      if (b->taken || b->after) { ++it; continue; }
      o.idle[b->small].erase(b);
      forget(at(b), at(b) + b->size);
      madvise(span(b->device).open + b->offset, b->size, MADV_DONTNEED);
      span(b->device).holes.emplace(b->size, b->offset);
      count(o.stats.segment, b->small, -1);
      count(o.stats.reserved_bytes, b->small, -(int64_t)b->size);
      o.stats.num_device_free++;
      it = o.heads.erase(it);
      delete b;
    }
    if (expandable()) for (bool small : {false, true}) give_up_pages(o, small);
  }
  void let_go(Of& o, Block* b) {  // to the pool, merged with its unused neighbours
    count(o.stats.active, b->small, -1);
    count(o.stats.active_bytes, b->small, -(int64_t)b->size);
    b->taken = false;
    b->users.clear();
    auto free = [&](Block* n) { return n && !n->taken && o.idle[n->small].count(n); };
    auto drop = [&](Block* n) { idle(o, n, -1); o.idle[n->small].erase(n); };
    if (free(b->before)) {
      Block* n = b->before;
      drop(n);
      n->size += b->size;
      n->after = b->after;
      if (b->after) b->after->before = n;
      delete b;
      b = n;
    }
    if (free(b->after)) {
      Block* n = b->after;
      drop(n);
      b->size += n->size;
      b->after = n->after;
      if (n->after) n->after->before = b;
      delete n;
    }
    o.idle[b->small].insert(b);
    idle(o, b, 1);
  }
  void settle(Of& o) {  // blocks whose recorded streams have passed
    for (size_t i = 0; i < o.limbo.size();) {
      Block* b = o.limbo[i];
      bool over = true;
      for (auto& u : b->uses) over &= u.stream->done >= u.upto;
      if (!over) { i++; continue; }
      for (auto& u : b->uses) forget_before(at(b), at(b) + b->size, u.stream->actor, u.number);
      b->uses.clear();
      o.limbo[i] = o.limbo.back();
      o.limbo.pop_back();
      let_go(o, b);
    }
  }
  c10::DataPtr allocate(size_t n) override {
    auto d = current_device();
    c10::Device device(kDevice, d);
    if (!n) return {nullptr, device};
    Site site = site_here("allocation");
    Stream* s = current_stream(d);
    size_t size = up(n, kRound);
    bool small = size <= kSmall;
    Lock lock(mutex());
    Of& o = devices[d];
    settle(o);
    Block* b = find(o, s, size, small);
    if (!b) b = segment(o, s, size, small);
    if (!b) {  // as CUDA's: wait for the device, give unused segments back, try again
      lock.unlock();
      host_waits_device(d);
      lock.lock();
      settle(o);
      give_up_segments(o);
      o.stats.num_alloc_retries++;
      b = segment(o, s, size, small);
    }
    if (!b) {
      o.stats.num_ooms++;
      auto mib = [](double x) { std::ostringstream t; t.precision(2); t << std::fixed << x / (1 << 20) << " MiB"; return t.str(); };
      auto held = o.stats.allocated_bytes[0].current, reserved = o.stats.reserved_bytes[0].current;
      auto limit = o.limit;
      lock.unlock();
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", mib(n), ". GPU ", (int)d,
          " has a total capacity of ", mib(limit), " of which ", mib(limit - reserved), " is free. ", mib(held),
          " is allocated by PyTorch, and ", mib(reserved - held), " is reserved by PyTorch but unallocated. (simulated)");
    }
    size_t rest = b->size - size;
    if (small ? rest >= kRound : rest > kSmall) {
      auto* r = new Block{d, s, b->offset + size, rest, 0, small};
      r->before = b;
      r->after = b->after;
      if (r->after) r->after->before = r;
      b->after = r;
      b->size = size;
      o.idle[small].insert(r);
      idle(o, r, 1);
    }
    b->taken = true;
    b->asked = n;
    o.taken.insert(b);
    count(o.stats.allocation, small, 1);
    count(o.stats.allocated_bytes, small, b->size);
    count(o.stats.active, small, 1);
    count(o.stats.active_bytes, small, b->size);
    count(o.stats.requested_bytes, small, n);
    handed_out(s, at(b), at(b) + b->size, site);
    char* open = span(d).open + b->offset;
    queue(s, Task{[open, size = b->size] { std::memset(open, 0xFF, size); }}, lock);
    c10::DataPtr result((void*)at(b), b, &release, device);
    lock.unlock();
    push(s, Task{});  // the schedule may run it now
    return result;
  }
  void give_back(Block* b) {
    Lock lock(mutex());
    Of& o = devices[b->device];
    o.taken.erase(b);
    count(o.stats.allocation, b->small, -1);
    count(o.stats.allocated_bytes, b->small, -(int64_t)b->size);
    count(o.stats.requested_bytes, b->small, -(int64_t)b->asked);
    for (auto* s : b->users) b->uses.push_back({s, s->queued, known(s->clock, s->actor)});
    b->uses.empty() ? let_go(o, b) : o.limbo.push_back(b);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    push(current_stream(), Task{[=] { std::memcpy(to_host(to), to_host(from), n); }});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int d = 0; d < device_count(); d++) {
      host_waits_device((c10::DeviceIndex)d);
      Lock lock(mutex());
      settle(devices[d]);
      give_up_segments(devices[d]);
    }
  }
  void recordStream(const c10::DataPtr& p, c10::Stream handle) override {
    if (!p.get() || p.get_deleter() != &release) return;
    auto* b = (Block*)p.get_context();
    auto* s = stream_of(handle);
    Lock lock(mutex());
    if (s != b->owner) b->users.insert(s);
  }
  Stats getDeviceStats(c10::DeviceIndex d) override { Lock lock(mutex()); return devices[d].stats; }
  template <class F> static void each(Stats& s, F&& f) {
    for (auto* a : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                    &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& one : *a) f(one);
  }
  void resetAccumulatedStats(c10::DeviceIndex d) override {
    Lock lock(mutex());
    each(devices[d].stats, [](auto& s) { s.reset_accumulated(); });
    devices[d].stats.num_ooms = devices[d].stats.num_alloc_retries = 0;
  }
  void resetPeakStats(c10::DeviceIndex d) override {
    Lock lock(mutex());
    each(devices[d].stats, [](auto& s) { s.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    Lock lock(mutex());
    return {devices[d].limit - devices[d].stats.reserved_bytes[0].current, devices[d].limit};
  }
  std::string snapshot() {  // lines: S device address size stream small · B offset size asked state
    Lock lock(mutex());
    std::ostringstream text;
    for (auto& o : devices)
      for (Block* head : o.heads) {
        size_t total = 0;
        for (Block* b = head; b; b = b->after) total += b->size;
        text << "S " << (int)head->device << ' ' << at(head) << ' ' << total << ' ' << head->owner->id << ' ' << head->small << '\n';
        for (Block* b = head; b; b = b->after)
          text << "B " << at(b) << ' ' << b->size << ' ' << b->asked << ' '
               << (o.taken.count(b) ? "active_allocated" : b->taken ? "active_pending_free" : "inactive") << '\n';
      }
    return text.str();
  }
};
Memory& memory() { static auto* m = new Memory; return *m; }
void release(void* block) { memory().give_back((Block*)block); }
int allocator_registered = (c10::SetAllocator(kDevice, &memory(), 0), 0);

// ---- pinned host memory --------------------------------------------------------------------------
struct Pending { Range range; uint32_t actor; uint64_t number; Site site; };
struct Pin {
  size_t size;
  bool ours, freed = false;
  std::vector<std::pair<Stream*, uint64_t>> uses;
  std::vector<Pending> pending;  // queued device work that the host has not waited for
  int open = 0;
};
std::map<uintptr_t, Pin>& pins() { static auto* p = new std::map<uintptr_t, Pin>; return *p; }
std::pair<const uintptr_t, Pin>* pin_of(uintptr_t p) {
  auto it = pins().upper_bound(p);
  if (it == pins().begin()) return nullptr;
  --it;
  return p < it->first + it->second.size && !it->second.freed ? &*it : nullptr;
}
void protect(uintptr_t base, const Pin& pin) {  // whole pages inside the memory; what is pending decides
  static bool watch = setting("SIM_WATCH_PINNED", 1L) != 0;
  if (!watch) return;
  auto pages = [&](uintptr_t b, uintptr_t e, int how) {
    uintptr_t low = up(base, kPage), high = pin.ours ? base + up(pin.size, kPage) : (base + pin.size) / kPage * kPage;
    b = std::max(low, b / kPage * kPage);
    e = std::min(high, (uintptr_t)up(e, kPage));
    if (b < e) mprotect((void*)b, e - b, how);
  };
  pages(base, base + pin.size, PROT_READ | PROT_WRITE);
  if (pin.open) return;
  for (auto& p : pin.pending) if (!p.range.writes) pages(p.range.begin, p.range.end, PROT_READ);
  for (auto& p : pin.pending) if (p.range.writes) pages(p.range.begin, p.range.end, PROT_NONE);
}

struct sigaction before;
void on_fault(int number, siginfo_t* info, void* context) {
  auto where = (uintptr_t)info->si_addr;
  bool writes = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2;
  const char* what = writes ? "a write by the host" : "a read by the host";
  if (device_of((void*)where) >= 0) {
    Access last;
    bool known_write;
    { Lock lock(mutex()); known_write = last_write(where, last); }
    std::string text = std::string("simulated device: memory of cuda:") + std::to_string(device_of((void*)where)) +
        " touched by the host: " + text_of(site_here(what)) + (known_write ? "; last written by " + text_of(last.site) : "") + "\n";
    (void)!write(2, text.data(), text.size());
    sigaction(SIGSEGV, &before, nullptr);  // the access is repeated and ends the process
    return;
  }
  Site earlier;
  bool conflict = false;
  {
    Lock lock(mutex());
    auto* found = pin_of(where);
    if (!found || found->second.pending.empty()) {
      if (!found) sigaction(SIGSEGV, &before, nullptr);
      else protect(found->first, found->second);
      return;
    }
    auto& pending = found->second.pending;
    for (size_t i = 0; i < pending.size();) {
      bool hit = where >= pending[i].range.begin && where < pending[i].range.end && (writes || pending[i].range.writes);
      if (!hit) { i++; continue; }
      if (!conflict) earlier = pending[i].site;
      conflict = true;
      pending.erase(pending.begin() + i);
    }
    if (!conflict)  // other bytes of the page: no longer watched
      for (size_t i = 0; i < pending.size();) {
        bool near = pending[i].range.begin / kPage <= where / kPage && (pending[i].range.end - 1) / kPage >= where / kPage;
        if (near) pending.erase(pending.begin() + i); else i++;
      }
    protect(found->first, found->second);
  }
  if (conflict)
    tell_later("simulated device: no order between " + text_of(earlier) + " and " + text_of(site_here(what)) +
               ": the host does not wait for the copy");
}
struct Pinned final : c10::Allocator {
  static void drop(void* p) { Lock lock(mutex()); pins().at((uintptr_t)p).freed = true; }
  c10::DataPtr allocate(size_t n) override {
    Lock lock(mutex());
    for (auto it = pins().begin(); it != pins().end();) {  // given up once the device is done with it
      bool over = it->second.freed && it->second.ours;
      for (auto& [s, upto] : it->second.uses) over &= s->done >= upto;
      if (!over) { ++it; continue; }
      forget(it->first, it->first + it->second.size);
      munmap((void*)it->first, up(it->second.size, kPage));
      it = pins().erase(it);
    }
    if (!n) return {nullptr, c10::Device(c10::kCPU)};
    void* p = mmap(nullptr, up(n, kPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "simulated device: no host memory");
    pins()[(uintptr_t)p] = Pin{n, true};
    return {p, p, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
}  // namespace

char* to_host(const void* p) {
  int d = device_of(p);
  return d < 0 ? (char*)p : span(d).open + ((char*)p - span(d).closed);
}
int device_of(const void* p) {
  for (int d = 0; d < device_count(); d++)
    if ((char*)p >= span(d).closed && (char*)p < span(d).closed + kSpanBytes) return d;
  return -1;
}
c10::DeviceAllocator* allocator() { return &memory(); }
c10::Allocator* pinned_allocator() { static auto* p = new Pinned; return p; }
bool is_pinned(const void* p) { Lock lock(mutex()); return p && pin_of((uintptr_t)p); }

void pinned_queued(Stream* s, const Range& r, const Site& site) {
  auto* found = pin_of(r.begin);
  if (!found) return;
  found->second.uses.emplace_back(s, s->queued + 1);
  found->second.pending.push_back({r, s->actor, known(s->clock, s->actor), site});
  protect(found->first, found->second);
}
void pinned_open(const Range& r, bool open) {
  Lock lock(mutex());
  auto it = pins().upper_bound(r.begin);
  if (it == pins().begin()) return;
  --it;
  if (r.begin >= it->first + it->second.size) return;
  it->second.open += open ? 1 : -1;
  protect(it->first, it->second);
}
void host_knows_more() {
  for (auto& [base, pin] : pins()) {
    size_t had = pin.pending.size();
    for (size_t i = 0; i < pin.pending.size();) {
      auto& p = pin.pending[i];
      if (known(host_clock(), p.actor) >= p.number) pin.pending.erase(pin.pending.begin() + i); else i++;
    }
    if (had != pin.pending.size()) protect(base, pin);
  }
}
extern "C" void sim_watch_host() {  // after Python's own handlers are set
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &before);
}
extern "C" void sim_register(void* p, size_t n) { Lock lock(mutex()); pins()[(uintptr_t)p] = Pin{n, false}; }
extern "C" void sim_unregister(void* p) {
  Site earlier;
  bool early = false;
  {
    Lock lock(mutex());
    auto it = pins().find((uintptr_t)p);
    if (it == pins().end()) return;
    if ((early = !it->second.pending.empty())) earlier = it->second.pending.front().site;
    it->second.pending.clear();
    protect(it->first, it->second);
    forget(it->first, it->first + it->second.size);
    pins().erase(it);
  }
  if (early)
    tell_later("simulated device: no order between " + text_of(earlier) + " and " + text_of(site_here("cudaHostUnregister")) +
               ": the memory is let go while a copy is queued");
}
extern "C" void sim_limit(int d, size_t bytes) { Lock lock(mutex()); memory().devices[d].limit = bytes; }
extern "C" const char* sim_snapshot() { static thread_local std::string text; text = memory().snapshot(); return text.c_str(); }
}  // namespace simgpu
