// Happens-before: which accesses to the same bytes are ordered by streams, events and waits.
//
// A launch on a stream is numbered; a clock says per stream up to which launch something knows the
// work to be over. A wait joins clocks. Two accesses of the same bytes, one of them a write, from two
// streams must be ordered: the later one's stream must know the earlier one. Memory that the allocator
// hands out again keeps what its former life left unordered, so that a block freed too early is found
// when it is used again. As torch/cuda/_sanitizer.py, by bytes instead of tensors. Source: Lamport 1978.
#include "device.h"
#include <Python.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <unordered_map>

namespace simgpu {
void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}
Clock& host_clock() { static auto* c = new Clock; return *c; }

// ---- places -----------------------------------------------------------------------------------
const char* intern(const std::string& text) {
  static auto* all = new std::set<std::string>;
  static auto* guard = new std::mutex;
  std::lock_guard<std::mutex> hold(*guard);
  return all->insert(text).first->c_str();
}
namespace {
std::vector<std::string>& foreign() { static auto* v = new std::vector<std::string>; return *v; }
bool is_foreign(PyCodeObject* code) {  // torch, the simulator, the standard library
  static auto* verdicts = new std::unordered_map<PyCodeObject*, bool>;
  auto found = verdicts->find(code);
  if (found != verdicts->end()) return found->second;
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  std::string file = name ? name : (PyErr_Clear(), "<unknown>");
  bool skip = file.empty() || file[0] == '<';
  for (auto& prefix : foreign()) skip |= file.compare(0, prefix.size(), prefix) == 0;
  Py_INCREF(code);  // its address is the key
  return verdicts->emplace(code, skip).first->second;
}
bool python_runs() { return Py_IsInitialized() && !_Py_IsFinalizing(); }
std::pair<void*, int> last_frame;  // under Python's lock
}  // namespace

Site site_here(const char* operation) {
  Site site{operation};
  if (!python_runs()) return site;
  auto state = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    bool found = !is_foreign(code);
    if (found) last_frame = {site.code = code, site.instruction = PyFrame_GetLasti(frame)};
    if (found) Py_INCREF(code);  // a report may come after the module is gone
    Py_DECREF(code);
    PyFrameObject* back = found ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  if (!site.code) std::tie(site.code, site.instruction) = last_frame;  // autograd's thread: who called it
  PyGILState_Release(state);
  if (auto node = torch::autograd::get_current_node()) site.node = intern(node->name());
  return site;
}
std::string text_of(const Site& site) {
  std::string text = site.operation;
  if (site.node) text += std::string(" in ") + site.node;
  if (!site.code || !python_runs()) return text;
  auto state = PyGILState_Ensure();
  auto* code = (PyCodeObject*)site.code;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (!file) PyErr_Clear();
  text += std::string(" at ") + (file ? file : "?") + ":" + std::to_string(PyCode_Addr2Line(code, site.instruction));
  PyGILState_Release(state);
  return text;
}
extern "C" void sim_foreign(const char* prefix) { foreign().push_back(prefix); }

// ---- accesses by bytes ------------------------------------------------------------------------
namespace {
struct Cell {  // bytes that were last used alike
  uintptr_t end;
  bool written = false;
  Access write;
  std::vector<Access> reads;   // since the write
  std::vector<Access> former;  // of an earlier life, unknown to the stream that has the bytes now
};
std::map<uintptr_t, Cell>& cells() { static auto* m = new std::map<uintptr_t, Cell>; return *m; }

void cut(uintptr_t at) {
  auto it = cells().upper_bound(at);
  if (it == cells().begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Cell tail = it->second;
  it->second.end = at;
  cells().emplace(at, std::move(tail));
}
// Calls f on each cell of the range; gaps become cells.
template <class F> void over(uintptr_t begin, uintptr_t end, F&& f) {
  cut(begin);
  cut(end);
  for (uintptr_t at = begin; at < end;) {
    auto it = cells().lower_bound(at);
    if (it == cells().end() || it->first > at) {
      uintptr_t upto = it == cells().end() ? end : std::min(end, it->first);
      it = cells().emplace(at, Cell{upto}).first;
    }
    at = it->second.end;
    f(it->first, it->second);
  }
}
bool unknown(const Stream* s, const Access& a) {
  return a.actor != s->actor && known(s->clock, a.actor) < a.number;
}
}  // namespace

void launched(Stream* s) {
  join(s->clock, host_clock());
  if (s->clock.size() <= s->actor) s->clock.resize(s->actor + 1);
  s->clock[s->actor]++;
}
void touch(Stream* s, const Range& r, const Site& site, std::vector<Conflict>& found) {
  Access mine{s->actor, known(s->clock, s->actor), r.writes, site};
  auto meet = [&](uintptr_t at, const Access& a, bool reused) {
    if (unknown(s, a) && found.empty()) found.push_back({a, mine, at, reused});
  };
  over(r.begin, r.end, [&](uintptr_t at, Cell& c) {
    if (c.written) meet(at, c.write, false);
    for (auto& a : c.former) meet(at, a, true);
    if (r.writes) {
      for (auto& a : c.reads) meet(at, a, false);
      return;
    }
    for (auto& a : c.reads)
      if (a.actor == mine.actor) { a = mine; return; }
    c.reads.push_back(mine);
  });
  if (!r.writes) return;
  cells().erase(cells().lower_bound(r.begin), cells().lower_bound(r.end));
  cells().emplace(r.begin, Cell{r.end, true, mine});
}
void handed_out(Stream* s, uintptr_t begin, uintptr_t end, const Site& site) {
  launched(s);
  Access mine{s->actor, known(s->clock, s->actor), true, site};
  bool any = false;
  over(begin, end, [&](uintptr_t, Cell& c) {
    std::vector<Access> left;
    for (auto& a : c.former) if (unknown(s, a)) left.push_back(a);
    for (auto& a : c.reads) if (unknown(s, a)) left.push_back(a);
    if (c.written && unknown(s, c.write)) left.push_back(c.write);
    any |= !left.empty();
    c.former = std::move(left);
    c.reads.clear();
    c.written = true;
    c.write = mine;
  });
  if (any) return;
  forget(begin, end);
  cells().emplace(begin, Cell{end, true, mine});
}
void forget(uintptr_t begin, uintptr_t end) {
  cut(begin);
  cut(end);
  cells().erase(cells().lower_bound(begin), cells().lower_bound(end));
}
void forget_before(uintptr_t begin, uintptr_t end, uint32_t actor, uint64_t number) {
  auto over_already = [&](const Access& a) { return a.actor == actor && a.number <= number; };
  over(begin, end, [&](uintptr_t, Cell& c) {
    for (auto* list : {&c.reads, &c.former})
      list->erase(std::remove_if(list->begin(), list->end(), over_already), list->end());
    if (c.written && over_already(c.write)) c.written = false;
  });
}
bool last_write(uintptr_t address, Access& a) {
  auto it = cells().upper_bound(address);
  if (it == cells().begin()) return false;
  --it;
  if (it->second.end <= address || !it->second.written) return false;
  a = it->second.write;
  return true;
}

// ---- reports -----------------------------------------------------------------------------------
namespace {
struct Reports { std::mutex guard; std::vector<std::string> all; std::string waits; size_t told = 0; };
Reports& reports() { static auto* r = new Reports; return *r; }
enum Answer { RAISE, REPORT, IGNORE };
Answer answer() {
  static auto said = setting("SIM_RACES", "raise");
  return said == "report" ? REPORT : said == "off" ? IGNORE : RAISE;
}
void report(const std::string& text) {
  std::lock_guard<std::mutex> hold(reports().guard);
  auto& all = reports().all;
  if (std::find(all.begin(), all.end(), text) != all.end()) return;
  all.push_back(text);
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(stderr);
}
}  // namespace

void tell(const std::vector<Conflict>& found) {
  raise_what_waits();
  if (found.empty() || answer() == IGNORE) return;
  auto& c = found.front();
  std::string text = std::string("simulated device: no order between ") + text_of(c.earlier.site) +
      (c.earlier.writes ? " (writes, stream " : " (reads, stream ") + std::to_string(c.earlier.actor) + ") and " +
      text_of(c.later.site) + (c.later.writes ? " (writes, stream " : " (reads, stream ") +
      std::to_string(c.later.actor) + ")" +
      (c.reused ? ": the memory was freed and handed out again before its former user was done"
                : ": the later stream never waits for the earlier one");
  reports().told++;
  if (answer() == REPORT) return report(text);
  TORCH_CHECK(false, text);
}
void tell_later(const std::string& text) {
  if (answer() == IGNORE) return;
  reports().told++;
  report(text);
  std::lock_guard<std::mutex> hold(reports().guard);
  if (answer() == RAISE && reports().waits.empty()) reports().waits = text;
}
void raise_what_waits() {
  std::string text;
  {
    std::lock_guard<std::mutex> hold(reports().guard);
    if (reports().waits.empty()) return;
    text.swap(reports().waits);
    auto& all = reports().all;  // who raises has told
    all.erase(std::remove(all.begin(), all.end(), text), all.end());
  }
  TORCH_CHECK(false, text);
}
extern "C" size_t sim_untold() {  // reports that no exception carried: a status for the exit
  std::lock_guard<std::mutex> hold(reports().guard);
  return reports().all.size();
}
extern "C" size_t sim_told() { return reports().told; }
}  // namespace simgpu
