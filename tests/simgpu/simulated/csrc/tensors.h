// Tensors as queued work sees them: bare addresses, and the bytes that an access covers.
#pragma once
#include "device.h"
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace simgpu {
inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }
at::Tensor on_host(const at::Tensor&);  // the same bytes as a CPU tensor that owns nothing
void add_ranges(const at::Tensor&, bool writes, std::vector<Range>&);
// Checks the accesses against all before them, then queues the work.
void launch(Stream*, const Site&, const std::vector<Range>&, std::function<void()> run, bool blocks = false);
std::vector<Conflict> launch_check(Stream*, const Site&, const std::vector<Range>&);

struct Below {  // under autograd, autocast and modes
  c10::impl::ExcludeDispatchKeyGuard keys{
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Python,
                           c10::DispatchKey::PythonTLSSnapshot})};
  c10::AutoGradMode no_grad{false};
};
}  // namespace simgpu
