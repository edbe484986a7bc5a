// Cells of LSTM and GRU that torch has for devices alone: their numbers on the CPU, of its other kernels.
// With biases given, gates are the sums of both parts; a workspace holds what the backward pass reads.
#include <ATen/Functions.h>
#include <torch/library.h>

namespace simgpu {
using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Maybe& bias) { return bias && bias->defined() ? gates + *bias : gates; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& cx, const Maybe& b1, const Maybe& b2) {
  auto parts = (with_bias(from_input, b1) + with_bias(from_hidden, b2)).chunk(4, 1);
  Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& kept, bool has_bias) {
  auto parts = kept.chunk(4, 1);
  Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3], t = cy.tanh();
  Tensor gh = grad_hy && grad_hy->defined() ? *grad_hy : cy.new_zeros(cy.sizes());
  Tensor gc = gh * o * (1 - t * t);
  if (grad_cy && grad_cy->defined()) gc = gc + *grad_cy;
  Tensor gates = at::cat(
      {gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)}, 1);
  return {gates, gc * f, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& hx, const Maybe& b1, const Maybe& b2) {
  auto a = with_bias(from_input, b1).chunk(3, 1), h = with_bias(from_hidden, b2).chunk(3, 1);
  Tensor r = (a[0] + h[0]).sigmoid(), z = (a[1] + h[1]).sigmoid(), n = (a[2] + r * h[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& kept, bool has_bias) {
  auto parts = kept.chunk(5, 1);
  Tensor r = parts[0], z = parts[1], n = parts[2], hx = parts[3], hn = parts[4];
  Tensor gz = grad_hy * (hx - n) * z * (1 - z), gn = grad_hy * (1 - z) * (1 - n * n);
  Tensor gr = gn * hn * r * (1 - r);
  Tensor gi = at::cat({gr, gz, gn}, 1), gh = at::cat({gr, gz, gn * r}, 1);
  return {gi, gh, grad_hy * z, has_bias ? gi.sum(0) : Tensor(), has_bias ? gh.sum(0) : Tensor()};
}
}  // namespace simgpu

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(simgpu::lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(simgpu::lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(simgpu::gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(simgpu::gru_cell_backward));
}
