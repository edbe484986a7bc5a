// Every operation of torch on the simulated device: its shape from the meta kernel now, its numbers
// from the CPU kernel when the stream comes to it. What has no meta kernel, or a shape that depends on
// data, waits for its stream; `sim::counts` lists both.
#include "tensors.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>
#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>
#include <unordered_set>

namespace simgpu {
using at::Tensor;
using c10::IValue;
using IValues = torch::jit::Stack;

// ---- random numbers: a seed and an offset, drawn when a kernel is queued, as a GPU's ------------
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = 0, offset_ = 0;
  explicit Generator(c10::DeviceIndex d)
      : GeneratorImpl(c10::Device(kDevice, d), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t s) override { seed_ = s; offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom()); return seed_; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor t = at::detail::empty_cpu({16}, at::kByte);
    auto* p = t.mutable_data_ptr<uint8_t>();
    std::memcpy(p, &seed_, 8);
    std::memcpy(p + 8, &offset_, 8);
    return t.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& s) override {
    TORCH_CHECK(s.numel() == 16 && s.device().is_cpu(), "RNG state is of the wrong size or not on the CPU");
    auto* p = (const char*)s.data();
    std::memcpy(&seed_, p, 8);
    std::memcpy(&offset_, p + 8, 8);
  }
  Generator* clone_impl() const override {
    auto* g = new Generator(device_.index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }
  uint64_t draw() {  // splitmix64 of (seed, offset): the seed of one kernel's own generator
    uint64_t x = (seed_ + 1) * 0x9E3779B97F4A7C15ull + (offset_ += 4);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }
};
const at::Generator& default_generator(c10::DeviceIndex d) {
  static auto* all = [] {
    auto* v = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) v->push_back(at::make_generator<Generator>((c10::DeviceIndex)i));
    return v;
  }();
  return all->at(d < 0 ? current_device() : d);
}
at::Generator kernels_own(const std::optional<at::Generator>& given, c10::DeviceIndex d) {
  at::Generator g = given && given->defined() ? *given : default_generator(d);
  TORCH_CHECK(g.device().type() == kDevice, "Expected a 'cuda' device type for generator but found '", g.device().type(), "'");
  std::lock_guard<std::mutex> hold(g.mutex());
  return at::make_generator<at::CPUGeneratorImpl>(static_cast<Generator*>(g.unsafeGetGeneratorImpl())->draw());
}

// ---- tensors over the same bytes -----------------------------------------------------------------
Tensor on_host(const Tensor& t) {
  auto& storage = t.unsafeGetTensorImpl()->unsafe_storage();
  size_t n = storage.nbytes();
  void* p = n ? to_host(storage.data()) : nullptr;
  c10::Storage alias(c10::Storage::use_byte_size_t(), n, c10::DataPtr(p, c10::kCPU), nullptr, false);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = r.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  impl->_set_conj(t.is_conj());
  impl->_set_neg(t.is_neg());
  return r;
}
Tensor make(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, c10::DeviceIndex d) {
  auto before = current_device();
  if (d >= 0) set_device(d);
  auto r = at::detail::empty_strided_generic(sizes, strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
  set_device(before);
  return r;
}
// The runs of bytes that a tensor covers; past 256 runs their hull.
void add_ranges(const Tensor& t, bool writes, std::vector<Range>& out) {
  if (!t.defined() || !t.numel() || !t.storage().nbytes()) return;
  auto size = (uintptr_t)t.itemsize();
  auto base = (uintptr_t)t.unsafeGetTensorImpl()->unsafe_storage().data() + t.storage_offset() * size;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size), the innermost first
  for (int64_t i = 0; i < t.dim(); i++)
    if (t.size(i) > 1 && t.stride(i)) dims.emplace_back(t.stride(i), t.size(i));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1, runs = 1;
  size_t inner = 0;
  for (; inner < dims.size() && dims[inner].first <= run; inner++)
    run = std::max(run, (dims[inner].second - 1) * dims[inner].first + run);
  for (size_t i = inner; i < dims.size(); i++) runs *= dims[i].second;
  if (runs > 256) {
    for (size_t i = inner; i < dims.size(); i++) run += (dims[i].second - 1) * dims[i].first;
    inner = dims.size();
  }
  std::vector<uintptr_t> starts{base};
  for (size_t i = inner; i < dims.size(); i++) {
    std::vector<uintptr_t> more;
    for (auto s : starts) for (int64_t k = 0; k < dims[i].second; k++) more.push_back(s + k * dims[i].first * size);
    starts.swap(more);
  }
  for (auto s : starts) out.push_back({s, s + run * size, writes});
}
std::vector<Conflict> launch_check(Stream* s, const Site& site, const std::vector<Range>& ranges) {
  std::vector<Conflict> found;
  Lock lock(mutex());
  launched(s);
  for (auto& r : ranges) if (!r.writes) touch(s, r, site, found);
  for (auto& r : ranges) if (r.writes) touch(s, r, site, found);
  return found;
}
void launch(Stream* s, const Site& site, const std::vector<Range>& ranges, std::function<void()> run, bool blocks) {
  tell(launch_check(s, site, ranges));
  push(s, Task{.run = std::move(run), .kernel = !blocks});
  if (!blocks) return;
  host_waits(s);
  count_launch(true);
}

template <class F> IValue mapped(const IValue& v, F&& f) {  // f on every tensor inside
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<Tensor> r;
    for (const Tensor& t : v.toTensorVector()) r.push_back(t.defined() ? f(t) : t);
    return r;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> r;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      r.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return r;
  }
  return v;
}
template <class F> void each(const IValue& v, F&& f) {
  mapped(v, [&](const Tensor& t) { f(t); return t; });
}

std::mutex& table_lock() { static auto* m = new std::mutex; return *m; }
std::map<std::string, int64_t>& counts() { static auto* c = new std::map<std::string, int64_t>; return *c; }
std::unordered_set<std::string>& without_meta() { static auto* s = new std::unordered_set<std::string>; return *s; }

// What a meta kernel's answer hangs on: types, shapes and strides of tensors, other arguments by value.
// number: a scalar beside a tensor, whose value changes no shape. False: something unknown is among them.
bool signature(const IValue& v, bool number, std::vector<const c10::TensorImpl*>& seen, std::string& key) {
  auto put = [&](int64_t n) { key.append((const char*)&n, sizeof n); };
  if (v.isTensor()) {
    const Tensor& t = v.toTensor();
    if (!t.defined()) return key += 'u', true;
    auto* impl = t.unsafeGetTensorImpl();
    key += 't';
    put((int64_t)t.scalar_type() * 2 + (!on_device(t) && impl->is_wrapped_number()));
    put(std::find(seen.begin(), seen.end(), impl) - seen.begin());  // the same one twice
    seen.push_back(impl);
    put(t.dim());
    for (auto n : t.sizes()) put(n);
    for (auto n : t.strides()) put(n);
  } else if (v.isList()) {
    key += 'l';
    put((int64_t)v.toListRef().size());
    for (const IValue& one : v.toListRef()) if (!signature(one, number, seen, key)) return false;
  } else if (v.isDouble()) {
    key += 'd';
    double x = v.toDouble();
    if (!number) key.append((const char*)&x, sizeof x);
  } else if (v.isInt() || v.isBool()) {
    key += v.isInt() ? 'i' : 'b';
    put(v.isInt() ? v.toInt() : v.toBool());
  } else if (v.isString()) {
    put((int64_t)v.toStringRef().size());
    key += v.toStringRef();
  } else {
    key += v.isNone() ? 'n' : 'o';
    return v.isNone() || v.isDevice() || v.isGenerator();
  }
  return true;
}
std::unordered_map<std::string, IValues>& answers() { static auto* m = new std::unordered_map<std::string, IValues>; return *m; }

std::string whence(const Tensor& t) {  // where a tensor was last written, for a message
  Access a;
  bool known_write = false;
  if (on_device(t) && t.numel()) {
    Lock lock(mutex());
    known_write = last_write((uintptr_t)t.unsafeGetTensorImpl()->unsafe_storage().data() + t.storage_offset() * t.itemsize(), a);
  }
  return t.device().str() + (known_write ? " (written by " + text_of(a.site) + ")" : "");
}

void fallback(const c10::OperatorHandle& op, IValues* stack) {
  const auto& schema = op.schema();
  const size_t n_args = schema.arguments().size(), n_rets = schema.returns().size();
  const std::vector<IValue> args(stack->end() - n_args, stack->end());
  const std::string full = schema.operator_name().name + (schema.operator_name().overload_name.empty() ? "" : "." + schema.operator_name().overload_name);
  const Site site = site_here(intern(full));

  Tensor first;
  bool takes_host = full.find("index") != std::string::npos || full.find("copy") != std::string::npos;
  for (auto& a : args) each(a, [&](const Tensor& t) { if (on_device(t) && !first.defined()) first = t; });
  for (auto& a : args) each(a, [&](const Tensor& t) {
    bool fits = on_device(t) ? t.device() == first.device() : t.dim() == 0 || !t.device().is_cpu() || takes_host;
    TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found at least two devices, ", whence(first),
                " and ", whence(t), ", in ", text_of(site));
  });
  c10::DeviceIndex device = first.defined() ? first.device().index() : current_device();
  if (!first.defined()) for (auto& a : args) if (a.isDevice() && a.toDevice().has_index()) device = a.toDevice().index();
  Stream* stream = current_stream(device);

  auto writes_arg = [&](size_t i) { auto* a = schema.arguments()[i].alias_info(); return a && a->isWrite(); };
  std::vector<Range> ranges;
  for (size_t i = 0; i < n_args; i++)
    each(args[i], [&](const Tensor& t) { if (on_device(t)) add_ranges(t, writes_arg(i), ranges); });

  int generator_at = -1;
  for (size_t i = 0; i < n_args; i++)
    if (args[i].isGenerator() || schema.arguments()[i].name() == "generator") generator_at = (int)i;
  at::Generator own;
  if (generator_at >= 0)
    own = kernels_own(args[generator_at].isGenerator() ? std::optional(args[generator_at].toGenerator()) : std::nullopt, device);
  TORCH_CHECK_NOT_IMPLEMENTED(generator_at >= 0 || !op.hasTag(at::Tag::nondeterministic_seeded), full,
      " draws from the default generator alone; the simulated device gives each kernel one of its own");

  // Addresses for the kernel; scalars and indices of the host are read now, as at a launch.
  std::unordered_map<const c10::TensorImpl*, Tensor> seen;
  auto as_cpu = [&](const Tensor& t) {
    auto& k = seen[t.unsafeGetTensorImpl()];
    if (k.defined()) return k;
    Below below;
    k = on_device(t) ? on_host(t) : t.clone();
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) k.unsafeGetTensorImpl()->set_wrapped_number(true);
    return k;
  };
  auto as_meta = [&](const Tensor& t) {
    if (!on_device(t) && t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
    auto& k = seen[t.unsafeGetTensorImpl()];
    if (!k.defined()) k = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
    return k;
  };
  auto arguments = [&](bool meta) {
    IValues s;
    seen.clear();
    for (size_t i = 0; i < n_args; i++) {
      if (args[i].isDevice()) s.push_back(c10::Device(meta ? c10::kMeta : c10::kCPU));
      else if ((int)i == generator_at) s.push_back(meta ? IValue() : IValue(own));
      else if (meta) s.push_back(mapped(args[i], as_meta));
      else s.push_back(mapped(args[i], as_cpu));
    }
    return s;
  };
  auto same_argument = [&](size_t r) {  // which argument a returned value is
    auto* alias = schema.returns()[r].alias_info();
    for (size_t i = 0; alias && i < n_args; i++) {
      auto* a = schema.arguments()[i].alias_info();
      if (a && *a == *alias) return (int)i;
    }
    return -1;
  };
  auto compute = [op](IValues s) {
    Below below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
    return s;
  };
  auto fresh = [&](const Tensor& t) { return make(t.sizes(), t.strides(), t.scalar_type(), device); };

  bool by_data = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  for (size_t i = 0; i < n_args; i++)  // who says how much comes does not wait for it
    by_data &= schema.arguments()[i].name() != "output_size" || !args[i].isInt();
  bool waits = by_data;
  {
    std::lock_guard<std::mutex> hold(table_lock());
    waits |= without_meta().count(full) > 0;
  }
  IValues shapes;  // asked once: most meta kernels are Python, and a step repeats itself
  std::string key = full + (char)c10::get_default_dtype_as_scalartype();
  std::vector<const c10::TensorImpl*> met;
  bool known = !waits;
  bool beside = false;  // a tensor: where there is none, or only `out`, numbers are sizes (arange)
  for (size_t i = 0; i < n_args; i++)
    if (!schema.arguments()[i].is_out()) each(args[i], [&](const Tensor&) { beside = true; });
  for (size_t i = 0; i < n_args && known; i++) {
    auto type = schema.arguments()[i].type();
    if (type->kind() == c10::TypeKind::ListType) type = type->containedType(0);
    known = signature(args[i], beside && type->kind() == c10::TypeKind::NumberType, met, key);
  }
  if (known) {
    std::lock_guard<std::mutex> hold(table_lock());
    auto found = answers().find(key);
    if (found != answers().end()) shapes = found->second;
  }
  if (!waits && shapes.empty()) {
    try {
      shapes = arguments(true);
      Below below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
      for (auto& s : shapes) waits |= !s.isTensor() && !s.isTensorList() && !s.isNone();
      if (known && !waits && !shapes.empty()) {
        std::lock_guard<std::mutex> hold(table_lock());
        if (answers().size() > 20000) answers().clear();
        answers().emplace(std::move(key), shapes);
      }
    } catch (const c10::NotImplementedError&) {
      waits = true;
      std::lock_guard<std::mutex> hold(table_lock());
      without_meta().insert(full);
    }
  }
  {
    std::lock_guard<std::mutex> hold(table_lock());
    counts()[waits ? full + " (waits)" : full]++;
  }

  std::vector<IValue> returned;
  if (waits) {
    tell(launch_check(stream, site, ranges));
    by_data ? host_waits(stream) : run_until(stream, UINT64_MAX);
    count_launch(true);
    IValues s = compute(arguments(false));
    std::vector<Range> results;
    std::vector<std::pair<Tensor, Tensor>> copies;
    for (size_t r = 0; r < n_rets; r++) {
      int i = same_argument(r);
      if (i >= 0) { returned.push_back(args[i]); continue; }
      returned.push_back(mapped(s[s.size() - n_rets + r], [&](const Tensor& t) {
        auto o = fresh(t);
        add_ranges(o, true, results);
        copies.emplace_back(on_host(o), t);
        return o;
      }));
    }
    if (!copies.empty())  // queued: the block's poison is queued before it
      launch(stream, site, results, [copies] { Below below; for (auto& [to, from] : copies) to.copy_(from); });
  } else {
    std::vector<std::vector<Tensor>> into(n_rets);
    for (size_t r = 0; r < n_rets; r++) {
      int i = same_argument(r);
      if (i >= 0) {
        if (args[i].isTensor() && shapes[r].isTensor() && args[i].toTensor().sizes() != shapes[r].toTensor().sizes())
          args[i].toTensor().resize_(shapes[r].toTensor().sizes());  // out= of another shape
        returned.push_back(args[i]);
        continue;
      }
      returned.push_back(mapped(shapes[r], [&](const Tensor& t) {
        auto o = fresh(t);
        add_ranges(o, true, ranges);
        into[r].push_back(on_host(o));
        return o;
      }));
    }
    launch(stream, site, ranges, [compute, full, n_rets, cpu = arguments(false), into = std::move(into)]() mutable {
      IValues s = compute(std::move(cpu));
      Below below;
      for (size_t r = 0; r < n_rets; r++) {
        size_t k = 0;
        if (into[r].empty()) continue;
        each(s[s.size() - n_rets + r], [&](const Tensor& t) {
          if (!t.numel()) { k++; return; }  // statistics of a batch norm that learns none
          TORCH_CHECK(t.sizes() == into[r][k].sizes(), full, " promised ", into[r][k].sizes(), " and gave ", t.sizes());
          into[r][k++].copy_(t);
        });
      }
    });
  }
  torch::jit::drop(*stack, n_args);
  for (auto& r : returned) stack->push_back(std::move(r));
}

// ---- what has to be its own --------------------------------------------------------------------
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto before = current_device();
  if (device && device->has_index()) set_device(device->index());
  auto r = at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype), format);
  set_device(before);
  return r;
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return make(size, stride, at::dtype_or_default(dtype), device && device->has_index() ? device->index() : -1);
}
bool one_run(const Tensor& a, const Tensor& b) {  // as CUDA's: one memcpy does it
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         ((a.is_contiguous() && b.is_contiguous()) || (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}
bool pinned(const Tensor& t) { return is_pinned((const void*)t.unsafeGetTensorImpl()->unsafe_storage().data()); }
void unpinned(const Site& site, const Tensor& host) {  // asked to be asynchronous, and is not
  static bool refuse = setting("SIM_UNPINNED", "allow") == "refuse";
  if (!refuse) return;
  TORCH_CHECK(false, "simulated device: ", text_of(site), " asks for an asynchronous copy, but the host's memory (",
              host.sizes(), " ", host.scalar_type(), ") is not pinned: the host waits for it");
}
// A copy between the device and pinned memory, queued; the host may not interfere until it has waited.
void queue_pinned(Stream* s, const Site& site, const Tensor& host, const Tensor& to, const Tensor& from, bool host_written) {
  std::vector<Range> ranges, pages;
  add_ranges(host, host_written, pages);
  add_ranges(host_written ? from : to, !host_written, ranges);
  for (auto& r : pages) ranges.push_back(r);
  tell(launch_check(s, site, ranges));
  {
    Lock lock(mutex());
    for (auto& r : pages) pinned_queued(s, r, site);
  }
  push(s, Task{.run = [x = on_host(from), y = on_host(to), pages] {
    Below below;
    for (auto& r : pages) pinned_open(r, true);
    y.copy_(x);
    for (auto& r : pages) pinned_open(r, false);
  }, .kernel = true});
}
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.numel() || !from.numel()) return to;
  bool here = on_device(to), there = on_device(from);
  Site site = site_here(here && there ? "device copy" : here ? "copy to the device" : "copy to the host");
  std::vector<Range> ranges;
  auto run = [](Tensor x, Tensor y) { return [x, y] { Below below; y.copy_(x); }; };
  if (here && there) {
    Stream* s = current_stream(from.device().index());
    Stream* other = current_stream(to.device().index());
    if (s != other) order(s, other);
    add_ranges(from, false, ranges);
    add_ranges(to, true, ranges);
    launch(s, site, ranges, run(on_host(from), on_host(to)));
    if (s != other) order(other, s);
  } else if (here) {
    Stream* s = current_stream(to.device().index());
    bool direct = from.scalar_type() == to.scalar_type() && from.is_contiguous() && from.sizes() == to.sizes();
    if (non_blocking && pinned(from) && (direct || one_run(from, to))) {
      queue_pinned(s, site, from, to, from, false);
    } else {
      if (non_blocking) unpinned(site, from);
      Tensor staged;
      { Below below; staged = from.clone(); }
      add_ranges(to, true, ranges);
      launch(s, site, ranges, run(staged, on_host(to)), !non_blocking);
    }
  } else {
    Stream* s = current_stream(from.device().index());
    if (non_blocking && pinned(to) && (to.is_contiguous() || one_run(from, to))) {
      queue_pinned(s, site, to, to, from, true);
    } else {
      if (non_blocking) unpinned(site, to);
      add_ranges(from, false, ranges);
      if (pinned(to)) add_ranges(to, true, ranges);
      tell(launch_check(s, site, ranges));
      host_waits(s);
      count_launch(true);
      Below below;
      Tensor target = to;
      target.copy_(on_host(from));
    }
  }
  return to;
}
at::Scalar item(const Tensor& t) {
  count_launch(true);
  Stream* s = current_stream(t.device().index());
  std::vector<Range> ranges;
  add_ranges(t, false, ranges);
  tell(launch_check(s, site_here("aten::item"), ranges));
  host_waits(s);
  Below below;
  return at::_local_scalar_dense(on_host(t));
}
void resize_storage(c10::StorageImpl* s, size_t n) {
  auto before = current_device();
  set_device(s->device().index());
  auto next = allocator()->allocate(n);
  size_t both = std::min(n, s->nbytes());
  if (both) {
    auto a = (uintptr_t)s->data(), b = (uintptr_t)next.get();
    launch(current_stream(), site_here("resize"), {{a, a + both, false}, {b, b + both, true}},
           [x = to_host((void*)a), y = to_host((void*)b), both] { std::memcpy(y, x, both); });
  }
  s->set_data_ptr_noswap(std::move(next));
  s->set_nbytes(n);
  set_device(before);
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  size_t n = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  auto* s = impl->unsafe_storage().unsafeGetStorageImpl();
  if (impl->numel() && n > s->nbytes()) resize_storage(s, n);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride, offset);
  else impl->set_sizes_contiguous(size);
  return self;
}
Tensor& set_whole(Tensor& self, at::Storage source) {
  int64_t n = (int64_t)(source.nbytes() / self.itemsize()), one = 1;
  return set_storage(self, std::move(source), 0, n, one);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  int64_t zero = 0, one = 1;
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage(self, std::move(s), 0, zero, one);
}
void record_stream(Tensor& self, at::Stream s) { allocator()->recordStream(self.storage().data_ptr(), s); }

// torch's CPU kernel draws from the host's default generator; here the mask is a kernel of its own.
std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (train && !*train) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}
int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return (int64_t)sdp::SDPBackend::math;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)device_count(); }
  c10::DeviceIndex current_device() const override { return simgpu::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return simgpu::current_device(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_device(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto before = simgpu::current_device();
    if (d >= 0) set_device(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  void deviceSynchronize(c10::DeviceIndex d) const override { host_waits_device(d); }
  std::string showConfig() const override { return "simulated"; }
  at::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Device getDeviceFromPtr(void* p) const override {
    int d = device_of(p);
    TORCH_CHECK(d >= 0, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return at::Device(kDevice, (c10::DeviceIndex)d);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? simgpu::current_device() : d);
  }
};
struct RegisterHooks {
  RegisterHooks() {
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs a) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<Hooks>(a);
    });
  }
} register_hooks;
}  // namespace simgpu

// A torch built without CUDA says at compile time that it has no accelerator. This library is loaded
// before torch, so that its answer is found first.
namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) { return simgpu::kDevice; }
}  // namespace at::accelerator
namespace at::native {
static RegisterCUDADispatch<struct _fused_sdp_choice_stub_DECLARE_DISPATCH_type> attention_registered(
    _fused_sdp_choice_stub, &simgpu::attention_choice);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&simgpu::fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(simgpu::empty));
  m.impl("empty_strided", TORCH_FN(simgpu::empty_strided));
  m.impl("copy_", TORCH_FN(simgpu::copy_));
  m.impl("_local_scalar_dense", TORCH_FN(simgpu::item));
  m.impl("resize_", TORCH_FN(simgpu::resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(simgpu::set_storage));
  m.impl("set_.source_Storage", TORCH_FN(simgpu::set_whole));
  m.impl("set_.source_Tensor", TORCH_FN(simgpu::set_tensor));
  m.impl("set_", TORCH_FN(simgpu::set_nothing));
  m.impl("record_stream", TORCH_FN(simgpu::record_stream));
  m.impl("native_dropout", TORCH_FN(simgpu::dropout));
  // Of torch's own pieces otherwise, which round as the CPU's kernel does on some processors only.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&simgpu::fallback>());
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
}
TORCH_LIBRARY(sim, m) {
  m.def("default_generator(int device) -> Generator?",
        [](int64_t d) { return simgpu::default_generator((c10::DeviceIndex)d); });
  m.def("resize_storage(Tensor t, int bytes) -> ()", [](const at::Tensor& t, int64_t n) {
    simgpu::resize_storage(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), n);
  });
  m.def("counts() -> str", [] {
    std::lock_guard<std::mutex> hold(simgpu::table_lock());
    std::string r;
    for (auto& [name, n] : simgpu::counts()) r += name + "\t" + std::to_string(n) + "\n";
    return r;
  });
}
