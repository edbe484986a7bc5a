// Formulas of the sliders, as in src/shoal/teach/calculators/scaling.py; a test compares both.
"use strict";
const shoalFormulas = {
  amdahl: (serial, devices) => 1 / (serial + (1 - serial) / devices),
  ringSeconds: (devices, bytes, alpha, bytesPerS) =>
    devices < 2 ? 0 : 2 * (devices - 1) * alpha + ((2 * (devices - 1)) / devices) * bytes / bytesPerS,
  stepSeconds(single, devices, bytes, alpha, bytesPerS, volume, overlap) {
    const compute = single / devices;
    const ring = volume * this.ringSeconds(devices, bytes, alpha, bytesPerS);
    return compute + Math.max(0, ring - overlap * compute);
  },
  bubbleShare: (ranks, microBatches) => (ranks - 1) / (microBatches + ranks - 1),
  stateBytes: (stage, ranks, parameters) =>
    (16 - [0, 12, 14, 16][stage]) * parameters + ([0, 12, 14, 16][stage] * parameters) / ranks,
  meanOfMeans: (lossA, lossB) => (lossA + lossB) / 2,
  meanOfTargets: (countA, lossA, countB, lossB) => (countA * lossA + countB * lossB) / (countA + countB),
  youngSeconds: (stall, mean) => Math.sqrt(2 * stall * mean),
};
if (typeof module !== "undefined") module.exports = shoalFormulas;
