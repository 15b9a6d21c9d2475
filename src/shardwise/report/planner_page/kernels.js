// The time of one operation on a device, and of the CPU to issue it: hardware/kernel_model.py, borrowed.py and
// planner/time/compute.py, in bf16.
"use strict";

const kernelModel = (() => {
  const HALF_SPEED = 16, MOST_VALUES = 256 * 160, MANY_WAVES = 8, RAMP = 100, START_SECONDS = 2e-6;
  const SPLITS = [1, 2, 4, 8, 16], LEAST_SPLIT = 512, FAR = 2, NEAR = 0.1;
  const BLOCK = 128, KEY_RAMP = 128, DIAGONAL = 512, SOFTMAX = 64, LAST_WAVE = 1, LONGEST = 8192, MOST_ROWS = 2 ** 18;
  const ALIGNED = [[8, ""], [4, " aligned to 4"], [2, " aligned to 2"], [1, " unaligned"]];
  const PEAK_SHARE = 0.9;
  const TILES = [64, 128, 192, 256].flatMap((rows) => [64, 96, 128, 160, 192, 256].map((columns) => [rows, columns]))
    .filter(([rows, columns]) => rows * columns <= MOST_VALUES)
    .map(([rows, columns]) => [rows, columns, 2 * (rows * columns + HALF_SPEED * (rows + columns))]);

  const keyOf = (kernel) => [kernel.name, kernel.role, kernel.dtype].filter(Boolean).join(" ");
  const isAttention = (kernel) => kernel.name.startsWith("attention");

  // The kernel of an operation at one batch: {name, dtype, flops, bytes, sizes, role}.
  function kernelOf(op, { law, backward }) {
    const [name, , flopsLaw, bytesLaw, dimLaws, moved, columnBytes] = op;
    const [flops] = law(flopsLaw), [bytes, line] = law(bytesLaw);
    const dims = dimLaws.map((number) => law(number)[0]);
    const dtype = flops ? "bf16" : "";
    if (name === "matmul") {
      const sizes = dims.length === 4 ? dims : [1, ...dims], [count, m, n, k] = sizes;
      const lastDim = law(dimLaws[dimLaws.length - 1])[2];
      const role = lastDim.slice(lastDim.length / 2).some((term) => term !== 0) ? "weight" : backward ? "input" : "forward";
      const inner = role === "weight" ? [m, n] : [n, k];
      const aligned = ALIGNED.find(([values]) => inner.every((size) => size % values === 0))[1];
      return { name, dtype: "bf16", flops: 2 * count * m * n * k, bytes, sizes, role: role + aligned };
    }
    if (name.startsWith("_scaled_dot_product") && dims.length) {
      const isBackward = name.endsWith("_backward"), [heads, queries, keys, width] = dims;
      const everything = (isBackward ? 5 : 2) * 2 * heads * queries * keys * width;
      const rows = Math.min(queries, LONGEST), columns = Math.min(keys, LONGEST);
      const sizes = [Math.min(heads, MOST_ROWS / rows), rows, columns, width, bytes / (heads * queries)];
      return { name: isBackward ? "attention_backward" : "attention", dtype: "bf16", flops, bytes, sizes, role: flops < everything ? "causal" : "full" };
    }
    if (name.startsWith("convolution") && flops) {
      const weight = Math.max(line[0], 1) / 2 / (name.endsWith("_backward") ? 2 : 1);
      const pixels = Math.max(flops / (2 * weight), 1);
      return { name, dtype: "bf16", flops, bytes, sizes: [pixels, weight, Math.max(bytes / pixels, 1)], role: "" };
    }
    if (dims.length) {
      return { name: name === "cat" ? "strided_cat" : "strided", dtype: "", flops: 0, bytes, sizes: [Math.max(4 * dims[0], 1), 1], role: "" };
    }
    const columns = columnBytes ? Math.max(line[0] / columnBytes, 1) : 1;
    // The bytes of an embedding include its whole table, but only the rows that are looked up are read.
    const looked = (name === "embedding" || name === "embedding_backward") && line[1] ? 2 * line[1] * law.batch : bytes;
    const size = looked * moved;
    return { name, dtype, flops, bytes: size, sizes: [Math.max(size, 1), columns], role: "" };
  }

  function productSeconds([count, m, n, k], flopsPerSecond, processors) {
    let best = Infinity;
    for (const [rows, columns, work] of TILES) {
      const tiles = count * Math.ceil(m / rows) * Math.ceil(n / columns);
      for (const split of SPLITS) {
        if (split > 1 && (k / split < LEAST_SPLIT || tiles > MANY_WAVES * processors)) break;
        best = Math.min(best, Math.ceil((tiles * split) / processors) * work * (k / split + RAMP));
      }
    }
    return (best * processors) / flopsPerSecond;
  }

  function attentionExcess([heads, queries, keys, width], isCausal, processors) {
    const padded = (Math.ceil(queries / BLOCK) * Math.ceil(keys / BLOCK) * BLOCK ** 2) / (queries * keys);
    const begun = 1 + (KEY_RAMP + (isCausal ? DIAGONAL : 0)) / keys;
    const waves = (heads * Math.ceil(queries / BLOCK)) / processors;
    return padded * begun * (1 + SOFTMAX / width) * (1 + LAST_WAVE / waves);
  }

  // Measured over predicted time, interpolated from the points nearby; 1 far from all of them.
  function correction(sizes, points) {
    if (!points || !points.length) return 1;
    const at = sizes.map(Math.log2);
    let total = 0, weights = 1 / FAR ** 2;
    for (const point of points) {
      let distance = 0;
      for (let index = 0; index < at.length; index++) distance += (at[index] - point[index]) ** 2;
      const weight = 1 / (distance + NEAR ** 2);
      total += weight * Math.log(point[at.length]);
      weights += weight;
    }
    return Math.exp(total / weights);
  }

  // The kernel model of a device, by its name; the seconds of each kernel are cached.
  function modelOf(hardware, name) {
    const device = hardware.devices[name], calibration = hardware.calibrations[device.calibration];
    const lender = device.lender ? modelOf(hardware, device.lender) : null;
    const isTiled = device.num_processors > 1;
    const seen = new Map();
    const startSeconds = (kernel) => calibration.kernel_seconds + (kernel.name === "matmul" && isTiled ? START_SECONDS : 0);
    const peakOf = (dtype) => (dtype ? device.peak : device.fp32_peak);

    function law(kernel) {
      const peak = peakOf(kernel.dtype);
      let computed = kernel.flops / peak;
      if (kernel.name === "matmul" && isTiled) computed = productSeconds(kernel.sizes, peak, device.num_processors);
      else if (isAttention(kernel) && isTiled) computed *= attentionExcess(kernel.sizes, kernel.role === "causal", device.num_processors);
      const bytes = kernel.name.startsWith("strided") ? kernel.sizes[0] : kernel.bytes;
      return Math.max(computed, bytes / device.memory_bytes_per_s);
    }

    function reachOf(kernel) {
      const { name, role, dtype } = kernel, keys = [keyOf(kernel), `${name} ${role.split(" aligned to")[0]} unaligned ${dtype}`,
        `${name} ${role} bf16`, `${name} ${dtype}`, name, "add"];
      const key = keys.find((one) => one in calibration.reach);
      return key === undefined ? 1 : calibration.reach[key];
    }

    const peakPart = (kernel, dtype) =>
      Math.max(kernel.flops / (dtype ? peakOf(dtype) : Infinity), kernel.bytes / device.memory_bytes_per_s) / PEAK_SHARE;

    function busy(kernel) {
      if (!lender || (kernel.name === "matmul" && !kernel.role.includes("aligned"))) return law(kernel) / reachOf(kernel);
      const borrowed = kernel.name.startsWith("batch_norm") ? { ...kernel, bytes: kernel.sizes[0] } : kernel;
      const rest = lender.seconds(borrowed) - lender.startSeconds(borrowed) - lender.peakPart(borrowed, borrowed.dtype);
      return peakPart(kernel, kernel.dtype) + Math.max(rest, 0) / device.processors;
    }

    function seconds(kernel) {
      const key = `${keyOf(kernel)}|${kernel.flops}|${kernel.bytes}|${kernel.sizes}`;
      let found = seen.get(key);
      if (found === undefined) {
        const family = isAttention(kernel) ? "attention" : kernel.name;
        found = startSeconds(kernel) + busy(kernel) / (device.relative_reach[family] ?? 1);
        if (device.is_own) found *= correction(kernel.sizes, calibration.points[keyOf(kernel)]);
        seen.set(key, found);
      }
      return found;
    }

    const copySeconds = (bytes) => {
      const size = Math.max(bytes, 1);
      return seconds({ name: "copy", dtype: "", flops: 0, bytes: size, sizes: [size, 1], role: "" });
    };

    // Seconds of the CPU to issue one operation.
    const issued = hardware.issues[device.issues], other = issued.other;
    const launchSeconds = (opName, backward, nodesPerOp) => {
      if (opName in issued) return issued[opName][backward ? 1 : 0];
      return backward ? other[1] + nodesPerOp * (issued.node ?? [0, 0])[1] : other[0];
    };

    const updateSeconds = (elements, tensors) => {
      const [issue, more, bytesEach, reach] = device.update;
      return [issue + more * tensors, (elements * bytesEach) / (device.memory_bytes_per_s * reach) + calibration.kernel_seconds];
    };
    return { device, seconds, startSeconds, peakPart, copySeconds, launchSeconds, updateSeconds, againSeconds: hardware.recompute_issues * other[0] };
  }

  // The seconds of single operations at one batch and length, each computed once: (number, backward) → seconds.
  function operations(model, { kernels, seq, batch }) {
    const laws = [], timed = [];
    const law = (number) => {
      if (laws[number] === undefined) {
        const line = memoryModel.lineOf(model.laws[number], seq);
        laws[number] = [line[0] + line[1] * batch, line, model.laws[number]];
      }
      return laws[number];
    };
    law.batch = batch;
    return (number, backward) => (timed[2 * number + backward] ??= kernels.seconds(kernelOf(model.ops[number], { law, backward })));
  }

  // [launch, kernel, span] of each piece that a model computes.
  function pieceSeconds(model, computed, { kernels, ops }) {
    const known = new Map();
    return computed.pieces.map(([list, isBackward, recomputed]) => {
      const key = `${list} ${isBackward} ${recomputed}`;
      if (!known.has(key)) {
        let launch = 0, kernel = 0, span = 0;
        model.computes[list].forEach((number, index) => {
          const backward = isBackward === 1 && index >= recomputed ? 1 : 0, seconds = ops(number, backward);
          launch += kernels.launchSeconds(model.ops[number][1], backward, computed.nodes_per_op);
          kernel += seconds;
          span = Math.max(span, launch) + seconds;
        });
        const again = recomputed ? kernels.againSeconds : 0;
        known.set(key, [launch + again, kernel, span + again]);
      }
      return known.get(key);
    });
  }

  // FLOPs of forward: those that do not depend on the batch, and those per sample.
  function forwardFlops(model, computed, seq) {
    let fixed = 0, each = 0;
    for (const [ops, isBackward, , units] of computed.pieces) {
      if (isBackward) continue;
      for (const number of model.computes[ops]) {
        const line = memoryModel.lineOf(model.laws[model.ops[number][2]], seq);
        fixed += units * line[0];
        each += units * line[1];
      }
    }
    return [fixed, each];
  }

  return { modelOf, operations, pieceSeconds, forwardFlops };
})();
