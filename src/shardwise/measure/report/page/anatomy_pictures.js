// The pictures of the anatomy. Each is made once for a strategy and a width, and returns a function that shows a frame.
"use strict";
const anatomyPictures = (data) => {
  const find = (selector, within) => within.querySelector(selector);
  const range = (count) => [...Array(count).keys()];
  const prefersStill = matchMedia("(prefers-reduced-motion: reduce)");
  const [PARAMS, GRADS] = range(2);
  const ON_ITS_WAY = data.held.indexOf("on its way");
  const HELD_CLASSES = data.held.map((words) => words.split(" ").slice(0, 2).join("-"));
  const COMPUTES = ["forward", "backward", "update"], SENDS = ["gather", "reduce", "reduce slice"];
  const OF_ALL = ["update", "broadcast", "reduce flags"];
  const ROUND_MS = 600;

  // Bytes with three digits and a unit.
  function size(bytes) {
    const power = Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10)), number = bytes / 1024 ** power;
    const digits = number >= 100 || power === 0 ? 0 : number >= 10 ? 1 : 2;
    return `${number.toFixed(digits)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  }

  function make(name, attributes, parent, text = "") {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    parent.append(element);
    return element;
  }
  function block(name, className, parent, text = "") {
    const element = document.createElement(name);
    element.className = className;
    element.textContent = text;
    parent.append(element);
    return element;
  }

  // The ranks: one row per unit, with params, grads and optim of each rank, and the slice that the rank owns in each.
  function ranksPicture(drawing, shown) {
    const width = drawing.parentElement.clientWidth, numUnits = shown.units.length, numRanks = data.ranks.length;
    const isNarrow = width < 460, gutter = isNarrow ? 58 : 84, letter = isNarrow ? 5.6 : 6.4, top = 36;
    const perLine = (width - gutter) / numRanks >= 58 ? numRanks : Math.ceil(numRanks / 2);
    const pitch = (width - gutter) / perLine, inner = pitch * 0.87;
    const high = Math.max(6, Math.min(24, Math.round(240 / numUnits))), lineHeight = top + numUnits * high + 14;
    const columns = [[0, 0.44], [0.49, 0.24], [0.77, 0.23]].map(([at, part]) => [at * inner, part * inner]);
    const left = (at) => gutter + (at % perLine) * pitch + pitch - inner;
    const y = (at, unit) => Math.floor(at / perLine) * lineHeight + top + unit * high;
    drawing.replaceChildren();
    drawing.setAttribute("height", lineHeight * Math.ceil(numRanks / perLine));
    drawing.classList.toggle("narrow", isNarrow);
    const rows = [], cells = [], room = Math.floor((gutter - 12) / letter);
    for (let first = 0; first < numRanks; first += perLine) {
      shown.units.forEach(([name], unit) => {
        const row = make("g", {}, drawing), middle = y(first, unit) + high / 2 - 1;
        make("rect", { x: 0, y: y(first, unit) - 2, width, height: high + 1, rx: 4, class: "band" }, row);
        const mark = make("text", { x: 1, y: middle }, row);
        // If rows are lower than a line of text, only some have their name.
        const isNamed = high > 10 || unit % Math.ceil(11 / high) === 0;
        const label = name.length > room ? `…${name.slice(1 - room)}` : name;
        if (isNamed) make("text", { x: 12, y: middle }, row, label);
        rows.push([unit, row, mark]);
      });
    }
    data.ranks.forEach((rank, at) => {
      make("text", { x: left(at), y: y(at, 0) - 22, class: "rank" }, drawing, `rank ${rank}`);
      columns.forEach(([x, wide], state) => {
        const word = data.states[state], isShort = wide < word.length * 4.8, own = wide / data.num_slices;
        const heading = { x: left(at) + x, y: y(at, 0) - 7, class: `heading ${word}` };
        make("text", heading, drawing, isShort ? word[0].toUpperCase() : word);
        shown.units.forEach((_, unit) => {
          const cell = make("g", {}, drawing), box = { x: left(at) + x, y: y(at, unit), width: wide, height: high - 3 };
          const slice = { x: box.x + own * (rank % data.num_slices), width: Math.max(1, own) };
          make("rect", { ...box, class: "rest" }, cell);
          make("rect", { ...box, ...slice, class: "own" }, cell);
          make("rect", { ...box, class: "box" }, cell);
          cells.push([cell, state, unit]);
        });
      });
    });

    // Chunks move from every rank to the next of its ring; those of the last rank leave on the right and enter on the left.
    const flows = make("g", {}, drawing), flying = new Map(), edge = pitch - inner + 2;
    function fly(state, unit, crosses) {
      const group = make("g", { class: `flow ${SENDS[state]}` }, flows), [x, wide] = columns[state];
      const length = state === GRADS && !shown.sharded[unit][GRADS] ? data.num_ranks : data.num_slices;
      const ringOf = (at) => (crosses ? data.ranks[at] % data.num_slices : Math.floor(data.ranks[at] / length));
      const chunk = Math.max(5, wide / data.num_slices);
      const send = (from, to, at) => {
        const box = { x: from, y: y(at, unit) + 2, width: chunk, height: Math.max(2, high - 7), rx: 1.5 };
        make("rect", box, group).style.setProperty("--distance", `${to - from}px`);
      };
      range(numRanks).forEach((at) => {
        const ring = range(numRanks).filter((other) => ringOf(other) === ringOf(at));
        const next = ring[(ring.indexOf(at) + 1) % ring.length];
        const from = left(at) + x + wide / 2, to = left(next) + x;
        if (to > from && y(next, unit) === y(at, unit)) return send(from, to, at);
        send(from, left(at) + inner + edge / 2, at);
        return send(left(next) - edge, to, next);
      });
      return group;
    }

    return (frame) => {
      const held = shown.states[frame], op = shown.operations[frame - 1];
      const touches = (unit) => op && (OF_ALL.includes(op.kind) ? op.kind === "update" : op.members.includes(unit));
      for (const [unit, row, mark] of rows) {
        row.setAttribute("class", touches(unit) ? "unit now" : "unit");
        mark.textContent = touches(unit) ? { forward: "▼", backward: "▲" }[op.kind] || "●" : "";
      }
      const wanted = new Set();
      for (const [cell, state, unit] of cells) {
        const now = held[state * numUnits + unit], where = shown.sharded[unit][state] ? "sharded" : "replicated";
        const work = state === PARAMS && touches(unit) && COMPUTES.includes(op.kind) ? "at-work" : "";
        cell.setAttribute("class", `cell ${data.states[state]} ${where} ${HELD_CLASSES[now]} ${work}`);
        const crosses = state === GRADS && shown.crossing[frame].has(unit);
        if (now === ON_ITS_WAY) wanted.add(`${state} ${unit} ${Number(crosses)}`);
      }
      for (const [key, group] of flying) if (!wanted.has(key) && flying.delete(key)) group.remove();
      for (const key of wanted) if (!flying.has(key)) flying.set(key, fly(...key.split(" ").map(Number)));
    };
  }

  // One bar per rank, all strategies on one scale: the measured memory of the frame, and the peak of the step.
  function memoryPicture(place, shown, scale) {
    place.replaceChildren();
    const percent = (bytes) => `${(100 * bytes) / scale}%`;
    const bars = data.ranks.map((rank, at) => {
      const bar = block("div", "anatomy-bar", place);
      block("span", "", bar, `rank ${rank}`);
      const track = block("div", "anatomy-track", bar);
      const parts = data.categories.map((category) => block("i", category, track));
      if (shown.memory[at]) block("b", "", track).style.left = percent(shown.peaks[at]);
      return [parts, block("span", "anatomy-value", bar, "not measured")];
    });
    return (frame) => bars.forEach(([parts, value], at) => {
      if (!shown.memory[at]) return;
      shown.memory[at][frame].forEach((bytes, index) => (parts[index].style.width = percent(bytes)));
      value.textContent = size(shown.sums[at][frame]);
    });
  }

  // The memory of the rank with the highest peak over the step, with its phases and a cursor.
  function curvePicture(drawing, shown, scale, end) {
    const width = drawing.parentElement.clientWidth, floor = 66, ceiling = 20;
    const [fullest, rows] = shown.curve || [0, null];
    const x = (frame) => (shown.places[frame] / end) * width;
    const y = (frame) => floor - ((rows ? rows[frame] : 0) / scale) * (floor - ceiling);
    drawing.replaceChildren();
    const corners = shown.places.map((_, frame) => `H${x(frame).toFixed(1)}V${y(frame).toFixed(1)}`).join("");
    make("path", { d: `M0 ${floor}${corners}H${width}V${floor}Z`, class: "area" }, drawing);
    for (const kind of COMPUTES) {
      const first = shown.operations.findIndex((op) => op.kind === kind);
      const from = kind === "forward" ? 0 : x(first + 1), isLate = from > width - 60;
      make("line", { x1: from, x2: from, y1: floor, y2: floor + 15, class: "phase" }, drawing);
      make("text", { x: from + (isLate ? -4 : 4), y: floor + 12, class: isLate ? "end" : "" }, drawing, kind);
    }
    if (rows) {
      const peak = rows.indexOf(Math.max(...rows));
      const isLate = x(peak) > width / 2;
      const at = { x: x(peak) + (isLate ? -6 : 6), y: y(peak) - 6, class: isLate ? "end" : "" };
      make("circle", { cx: x(peak), cy: y(peak), r: 3.5 }, drawing);
      make("text", at, drawing, `peak of rank ${fullest}: ${size(rows[peak])}`);
    }
    const cursor = make("line", { x1: 0, x2: 0, y1: 8, y2: floor + 2, class: "cursor" }, drawing);
    return (frame, place) => (cursor.style.transform = `translateX(${(place / end) * width}px)`);
  }

  // The ring of the collective in flight: the rounds of ring.py, one after the other.
  function ringPicture(place) {
    const drawing = find("svg", place), words = find("p", place), buttons = [...place.querySelectorAll("button")];
    let flight = null, ring = null, first = [], rounds = [], round = 0, timer = 0, nodes = [], middle = [];

    function build(length, stride) {
      ring = { ...data.rings[length], stands: length, stride };
      const count = ring.num_ranks, isLarge = count > 5, wide = isLarge ? 7 : count > 3 ? 12 : 16, high = isLarge ? 24 : 28;
      const width = drawing.parentElement.clientWidth, down = isLarge ? 96 : 48, cx = width / 2, cy = down + 36;
      const across = Math.min(cx - (count * wide) / 2 - 8, 220);
      const at = (turn) => [cx + across * Math.sin(2 * Math.PI * turn), cy - down * Math.cos(2 * Math.PI * turn)];
      drawing.replaceChildren();
      drawing.setAttribute("height", 2 * cy);
      make("ellipse", { cx, cy, rx: across, ry: down }, drawing);
      middle = [-4, 14].map((shift) => make("text", { x: cx, y: cy + shift, class: "middle" }, drawing));
      nodes = range(count).map((rank) => {
        const [x, y] = at((rank + 0.5) / count), [before, arrow, after] = [-0.01, 0, 0.01].map((by) => at(rank / count + by));
        const angle = (Math.atan2(after[1] - before[1], after[0] - before[0]) * 180) / Math.PI;
        make("path", { d: "M-4 -5L5 0L-4 5Z", transform: `translate(${arrow}) rotate(${angle})`, class: "arrow" }, drawing);
        const start = x - (count * wide) / 2, top = y - high / 2;
        const frame = { x: start - 4, y: top - 4, width: count * wide + 7, height: high + 8, rx: 5, class: "node" };
        make("rect", frame, drawing);
        make("text", { x, y: top + (y > cy ? high + 17 : -9), class: "rank" }, drawing, `rank ${rank * stride}`);
        return range(count).map((chunk) => {
          const box = { x: start + chunk * wide, y: top, width: wide - 1, height: high };
          const back = make("rect", { ...box, class: "chunk" }, drawing);
          const layer = (from) => ({ ...box, y: top + high - ((from + 1) * high) / count, height: high / count });
          const sum = range(count).map((from) => make("rect", { ...layer(from), class: "none" }, drawing));
          return { box, back, sum };
        });
      });
    }
    function draw() {
      drawing.querySelectorAll(".sent").forEach((old) => old.remove());
      place.classList.toggle("idle", !flight);
      [buttons[0].disabled, buttons[1].disabled] = [!flight || round === 0, !flight || round === rounds.length];
      drawing.setAttribute("class", flight ? flight.kind : "");
      if (!flight) {
        words.textContent = "No collective is under way.";
        [middle[0].textContent, middle[1].textContent] = ["nothing is sent", ""];
        return;
      }
      const [part, sent, cells] = round ? rounds[round - 1] : ["", [], first];
      nodes.forEach((chunks, rank) => chunks.forEach(({ back, sum }, chunk) => {
        const bits = cells[rank][chunk], arrived = sent[(rank || nodes.length) - 1] === chunk;
        back.setAttribute("class", `chunk ${bits === 2 ** nodes.length - 1 ? "whole" : ""} ${arrived ? "fresh" : ""}`);
        sum.forEach((layer, from) => layer.setAttribute("class", (bits >> from) & 1 ? "summand" : "none"));
      }));
      sent.forEach((chunk, rank) => {
        const { box } = nodes[rank][chunk], to = nodes[(rank + 1) % nodes.length][chunk].box;
        const moving = make("rect", { ...box, class: "sent" }, drawing);
        moving.style.setProperty("--x", `${to.x - box.x}px`);
        moving.style.setProperty("--y", `${to.y - box.y}px`);
      });
      const groups = ring.stands < data.num_ranks ? ` So does each other group of ${ring.stands} ranks.` : "";
      const of = ring.stands > nodes.length ? ` A ring of ${nodes.length} stands here for one of ${ring.stands}.` : groups;
      const does = part === "reduce-scatter" ? "adds it to its own" : "keeps it";
      const own = flight.kind === "reduce slice" ? "group’s sum" : "gradients";
      words.textContent = `${flight.title}: ${!rounds.length ? "one rank sends nothing."
        : round ? `every rank sends a chunk (${size(flight.bytes / ring.stands)}) to the next, which ${does}.`
        : flight.kind === "gather" ? "every rank has one chunk."
        : `every rank has all chunks, of its own ${own}.`}${of}`;
      middle[0].textContent = part || flight.way;
      middle[1].textContent = rounds.length ? `round ${round} of ${rounds.length}` : "";
    }
    function turn(steps) {
      round = Math.max(0, Math.min(rounds.length, round + steps));
      draw();
    }
    const stop = () => clearInterval(timer);
    buttons.forEach((button, index) => button.addEventListener("click", () => { stop(); turn(2 * index - 1); }));
    return {
      stop,
      rebuild() { if (ring) { build(ring.stands, ring.stride); draw(); } },
      show(next, milliseconds) {
        if (next === flight && ring) return;
        [flight, round] = [next, 0];
        stop();
        const { length, stride } = next || { length: data.num_slices, stride: 1 };
        if (!ring || ring.stands !== length || ring.stride !== stride) build(length, stride);
        if (next) {
          [first, rounds] = ring[next.way];
          const pace = milliseconds ? milliseconds / (rounds.length + 1) : ROUND_MS;
          place.style.setProperty("--round", `${pace}ms`);
          if (!prefersStill.matches) timer = setInterval(() => (round < rounds.length ? turn(1) : stop()), pace);
        }
        draw();
      },
    };
  }

  return { GRADS, SENDS, OF_ALL, size, block, ranksPicture, memoryPicture, curvePicture, ringPicture };
};
