// Collectives of the simulated device under NCCL's manners: queued on a stream of the group, moved by
// gloo over the same bytes. `Work.wait` lets the current stream wait, not the host. Operations of one
// group run in the order of their launch, but that order is no promise to the program: clocks count
// only waits. Messages between two ranks share one stream, both ways, as NCCL's.
#include "tensors.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

namespace simgpu {
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Handle = c10::intrusive_ptr<c10d::Work>;

struct Queued final : c10d::Work {
  Stream* stream;  // nullptr: part of a coalesced operation, which has a handle of its own
  uint64_t upto = 0;
  Clock clock;
  Tensors kept, results;
  bool blocks_host = false;
  Queued(Stream* s, Tensors all, Tensors out) : stream(s), kept(std::move(all)), results(std::move(out)) {}
  ~Queued() override {  // never waited for: the memory stays until the operation is over
    if (stream) for (auto& t : kept) allocator()->recordStream(t.storage().data_ptr(), handle_of(stream));
  }
  bool isCompleted() override { return !stream || host_asks(stream, upto, clock); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(c10d::kUnsetTimeout); }
  bool wait(std::chrono::milliseconds) override {
    if (!stream) return true;
    Stream* current = current_stream(stream->device);
    if (current != stream) {
      {
        Lock lock(mutex());
        join(current->clock, clock);
      }
      push(current, Task{nullptr, nullptr, stream, upto});
    }
    if (blocks_host) host_waits(stream, upto, clock);
    kept.clear();
    return true;
  }
  std::vector<Tensor> result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    Stream* before = current_stream(stream->device);  // the future waits by stream, as NCCL's does
    auto f = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kDevice, stream->device)});
    set_stream(stream);
    f->markCompleted(c10::IValue(results));
    set_stream(before);
    return f;
  }
};

struct Operation {
  const char* name;
  Tensors reads, writes;
  std::function<Handle()> start;
  std::function<void()> after;
};

struct Collectives final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::map<std::pair<int, int>, Stream*> lanes;  // (device, peer or -1)
  Stream* last = nullptr;
  uint64_t last_upto = 0, sequence = 0;
  bool coalescing = false;
  std::vector<Operation> coalesced;
  std::mutex launches;

  explicit Collectives(c10::intrusive_ptr<c10d::Backend> g) : Backend(g->getRank(), g->getSize()), gloo(g) {
    if (getSize() > 1) keep_moving();
  }
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  void setTimeout(std::chrono::milliseconds t) override { gloo->setTimeout(t); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing = true; }
  Handle endCoalescing() override {
    coalescing = false;
    auto all = std::move(coalesced);
    coalesced.clear();
    if (all.empty()) return c10::make_intrusive<Queued>(nullptr, Tensors{}, Tensors{});
    return queue(std::move(all), true, -1);
  }

  Handle queue(Operation o, bool async, int peer = -1) {
    for (auto* list : {&o.reads, &o.writes})
      for (auto& t : *list) {
        TORCH_CHECK(on_device(t), o.name, ": No backend type associated with device type ", t.device().type(),
                    " (NCCL takes tensors of the device only)");
        TORCH_CHECK(t.is_contiguous() || t.is_non_overlapping_and_dense(), o.name, ": Tensors must be contiguous");
      }
    if (!coalescing) return queue(std::vector<Operation>{std::move(o)}, async, peer);
    coalesced.push_back(std::move(o));
    return c10::make_intrusive<Queued>(nullptr, Tensors{}, Tensors{});
  }
  Handle queue(std::vector<Operation> all, bool async, int peer) {
    Tensors used, out;
    std::vector<Range> ranges;
    for (auto& o : all) {
      for (auto& t : o.reads) { used.push_back(t); add_ranges(t, false, ranges); }
      for (auto& t : o.writes) { used.push_back(t); out.push_back(t); add_ranges(t, true, ranges); }
    }
    auto device = used.empty() ? current_device() : used[0].device().index();
    Site site = site_here(all[0].name);
    std::lock_guard<std::mutex> hold(launches);
    sequence++;
    Stream* current = current_stream(device);
    Stream* s = current;
    if (async) {
      auto& lane = lanes[{device, peer}];
      if (!lane) lane = pool_stream(device);
      s = lane;
      uint64_t upto;
      {
        Lock lock(mutex());
        join(s->clock, current->clock);
        upto = current->queued;
      }
      if (s != current) push_async(s, Task{nullptr, nullptr, current, upto});
    }
    if (peer < 0 && last && last != s) push_async(s, Task{nullptr, nullptr, last, last_upto});
    tell(launch_check(s, site, ranges));
    auto over = std::make_shared<std::atomic<bool>>(false);
    auto error = std::make_shared<std::exception_ptr>();
    auto work = c10::make_intrusive<Queued>(s, std::move(used), std::move(out));
    {
      Lock lock(mutex());
      work->upto = s->queued + 1;
      work->clock = s->clock;
    }
    if (peer < 0) { last = s; last_upto = work->upto; }
    std::vector<std::pair<std::function<Handle()>, std::function<void()>>> parts;
    for (auto& o : all) parts.emplace_back(o.start, o.after);
    push_async(s, Task{
        .run = [=] {
          std::vector<Handle> begun;
          for (auto& p : parts) begun.push_back(p.first());
          std::thread([=] {
            try {
              for (size_t i = 0; i < parts.size(); i++) {
                begun[i]->wait();
                if (parts[i].second) parts[i].second();
              }
            } catch (...) { *error = std::current_exception(); }
            *over = true;
          }).detach();
        },
        .poll = [=] {
          if (!*over) return false;
          if (*error) std::rethrow_exception(*error);
          return true;
        },
        .kernel = true});
    return work;
  }

  // Gloo knows few types; what only moves goes as numbers of the same size.
  static Tensor plain(const Tensor& t) {
    auto kind = t.itemsize() == 1 ? at::kByte : t.itemsize() == 2 ? at::kHalf : t.itemsize() == 4 ? at::kInt : at::kLong;
    return on_host(t).view(kind);
  }
  static Tensor summed(const Tensor& t) { return t.scalar_type() == at::kBool ? on_host(t).view(at::kByte) : on_host(t); }
  static Tensors plain(const Tensors& ts) { Tensors r; for (auto& t : ts) r.push_back(plain(t)); return r; }
  static Tensors summed(const Tensors& ts) { Tensors r; for (auto& t : ts) r.push_back(summed(t)); return r; }
  static Lists plain(const Lists& ls) { Lists r; for (auto& l : ls) r.push_back(plain(l)); return r; }
  static Lists summed(const Lists& ls) { Lists r; for (auto& l : ls) r.push_back(summed(l)); return r; }
  static Tensors flat(const Lists& ls) { Tensors r; for (auto& l : ls) r.insert(r.end(), l.begin(), l.end()); return r; }
  template <class O> std::function<void()> mean(O& o, Tensors outs) const {  // gloo has no AVG
    if (o.reduceOp != c10d::ReduceOp::AVG) return nullptr;
    o.reduceOp = c10d::ReduceOp::SUM;
    return [outs, n = getSize()]() mutable { c10::AutoGradMode off(false); for (auto& t : outs) t.div_(n); };
  }

  Handle broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    bool root = o.rootRank == getRank();
    return queue({"broadcast", root ? t : Tensors{}, root ? Tensors{} : t,
                  [g = gloo, c = plain(t), o]() mutable { return g->broadcast(c, o); }}, o.asyncOp);
  }
  Handle allreduce(Tensors& t, const c10d::AllreduceOptions& given) override {
    auto o = given;
    auto c = summed(t);
    auto after = mean(o, c);
    return queue({"all_reduce", {}, t, [g = gloo, c, o]() mutable { return g->allreduce(c, o); }, after}, o.asyncOp);
  }
  Handle allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& given) override {
    c10d::AllreduceOptions o;
    o.reduceOp = given.reduceOp;
    return together(t.size(), [&](size_t i) { Tensors one{t[i]}; allreduce(one, o); });
  }
  template <class F> Handle together(size_t n, F&& f) {
    bool inside = coalescing;
    startCoalescing();
    for (size_t i = 0; i < n; i++) f(i);
    if (inside) return c10::make_intrusive<Queued>(nullptr, Tensors{}, Tensors{});
    return endCoalescing();
  }
  Handle reduce(Tensors& t, const c10d::ReduceOptions& given) override {
    auto o = given;
    auto c = summed(t);
    auto after = mean(o, c);
    return queue({"reduce", {}, t, [g = gloo, c, o]() mutable { return g->reduce(c, o); }, after}, o.asyncOp);
  }
  Handle allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto uneven = [&](const Tensor& t) { return t.sizes() != in[0].sizes(); };
    if (std::any_of(out[0].begin(), out[0].end(), uneven))  // NCCL's is a group of broadcasts then
      return queue({"all_gather", in, flat(out), [g = gloo, a = plain(out[0]), b = plain(in[0]), rank = getRank()]() mutable {
                      a[rank].copy_(b);
                      for (size_t i = 0; i < a.size(); i++) {
                        c10d::BroadcastOptions from;
                        from.rootRank = i;
                        Tensors one{a[i]};
                        g->broadcast(one, from)->wait();
                      }
                      return Handle(c10::make_intrusive<Queued>(nullptr, Tensors{}, Tensors{})); }}, o.asyncOp);
    return queue({"all_gather", in, flat(out),
                  [g = gloo, a = plain(out), b = plain(in), o]() mutable { return g->allgather(a, b, o); }}, o.asyncOp);
  }
  Handle _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return queue({"all_gather_into_tensor", {in}, {out},
                  [g = gloo, a = plain(out), b = plain(in), o]() mutable { return g->_allgather_base(a, b, o); }}, o.asyncOp);
  }
  Handle allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return together(out.size(), [&](size_t i) { _allgather_base(out[i], in[i], o); });
  }
  Handle reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& given) override {
    auto o = given;
    auto c = summed(out);
    auto after = mean(o, c);
    return queue({"reduce_scatter", flat(in), out,
                  [g = gloo, c, b = summed(in), o]() mutable { return g->reduce_scatter(c, b, o); }, after}, o.asyncOp);
  }
  Handle _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& given) override {
    auto o = given;
    Tensors c{summed(out)};
    auto after = mean(o, c);
    return queue({"reduce_scatter_tensor", {in}, {out},
                  [g = gloo, c, b = summed(in), o]() mutable { return g->_reduce_scatter_base(c[0], b, o); }, after}, o.asyncOp);
  }
  Handle reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return together(out.size(), [&](size_t i) { _reduce_scatter_base(out[i], in[i], o); });
  }
  Handle alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
                       const c10d::AllToAllOptions& o) override {
    return queue({"all_to_all_single", {in}, {out}, [g = gloo, a = plain(out), b = plain(in), to, from, o]() mutable {
                    return g->alltoall_base(a, b, to, from, o); }}, o.asyncOp);
  }
  Handle alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    for (auto* list : {&out, &in}) for (auto& t : *list) TORCH_CHECK(t.is_contiguous(), "all_to_all: Tensors must be contiguous");
    return queue({"all_to_all", in, out, [g = gloo, a = plain(out), b = plain(in), o]() mutable {
                    Tensors flat_in;
                    std::vector<int64_t> to, from;
                    int64_t total = 0;
                    auto bytes = [](const Tensor& t) { return t.reshape({-1}).view(at::kByte); };
                    for (auto& t : b) { flat_in.push_back(bytes(t)); from.push_back(flat_in.back().numel()); }
                    for (auto& t : a) { to.push_back(bytes(t).numel()); total += to.back(); }
                    Tensor whole = at::empty({total}, at::kByte), sent = at::cat(flat_in);
                    g->alltoall_base(whole, sent, to, from, o)->wait();
                    int64_t begin = 0;
                    for (size_t i = 0; i < a.size(); begin += to[i++]) bytes(a[i]).copy_(whole.narrow(0, begin, to[i]));
                    return Handle(c10::make_intrusive<Queued>(nullptr, Tensors{}, Tensors{})); }}, o.asyncOp);
  }
  Handle gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return queue({"gather", in, flat(out),
                  [g = gloo, a = plain(out), b = plain(in), o]() mutable { return g->gather(a, b, o); }}, o.asyncOp);
  }
  Handle scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    return queue({"scatter", flat(in), out,
                  [g = gloo, a = plain(out), b = plain(in), o]() mutable { return g->scatter(a, b, o); }}, o.asyncOp);
  }
  Handle send(Tensors& t, int to, int tag) override {
    return queue({"send", t, {}, [g = gloo, c = plain(t), to, tag]() mutable { return g->send(c, to, tag); }}, true, to);
  }
  Handle recv(Tensors& t, int from, int tag) override {
    return queue({"recv", {}, t, [g = gloo, c = plain(t), from, tag]() mutable { return g->recv(c, from, tag); }}, true, from);
  }
  Handle barrier(const c10d::BarrierOptions& o) override {
    auto h = queue({"barrier", {}, {}, [g = gloo, o]() { return g->barrier(o); }}, true);
    static_cast<Queued*>(h.get())->blocks_host = true;
    return h;
  }
};
}  // namespace simgpu

PYBIND11_MODULE(_simgpu_collectives, m) {
  py::module_::import("torch._C._distributed_c10d");
  m.def("over", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<simgpu::Collectives>(std::move(gloo));
  });
}
