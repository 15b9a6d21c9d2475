// The anatomy of a step: data (a recorded tape per strategy) → state (one moment of the step) → draw (two panes).
"use strict";
(() => {
  const source = document.getElementById("anatomy-data");
  const home = document.querySelector(".anatomy");
  if (!source || !home) return;
  const data = JSON.parse(source.textContent);
  const find = (selector, within = home) => within.querySelector(selector);
  const last = (list) => list[list.length - 1];
  const { GRADS, SENDS, OF_ALL, size, block, ranksPicture, memoryPicture, curvePicture, ringPicture } = anatomyPictures(data);
  const MOMENT_MS = 1000, COLLECTIVE_MS = 2000;

  // ---- data: frames and rows of memory come as differences, which are added up here
  function unfold(packed) {
    const { name, about, units, subjects, captions, places, flights, peaks, curve } = packed;
    const sharded = units.map(([, letters]) => [...letters].map((letter) => letter === "S"));
    // The units whose slices are being reduced between groups of ranks, after each frame.
    const states = [packed.start], crossing = [new Set()];
    const operations = packed.frames.map(([kind, subject, bytes, caption, micros, changes]) => {
      const held = last(states).slice();
      for (let at = 0; at < changes.length; at += 2) held[changes[at]] = changes[at + 1];
      states.push(held);
      const [label, members] = subjects[subject];
      const verb = data.kinds[kind], isScattered = sharded[members[0]][GRADS], crosses = verb === "reduce slice";
      const onTheirWay = new Set(last(crossing));
      if (crosses) members.forEach((unit) => onTheirWay.add(unit));
      if (verb === "wait slice") members.forEach((unit) => onTheirWay.delete(unit));
      crossing.push(onTheirWay);
      const title = OF_ALL.includes(verb) ? verb : `${verb} ${label}`;
      const sent = size(verb === "gather" ? bytes / data.num_slices : bytes);
      const way = verb === "gather" ? "all-gather" : isScattered && !crosses ? "reduce-scatter" : "all-reduce";
      // The length of the ring, and the distance between its ranks: ranks of a group are consecutive.
      const [length, stride] = crosses ? [data.num_ranks / data.num_slices, data.num_slices]
        : [way === "all-reduce" ? data.num_ranks : data.num_slices, 1];
      const text = captions[caption].replace("{size}", sent);
      return { kind: verb, members, bytes, title, caption: text, way, length, stride, micros };
    });
    const total = (row) => row.reduce((sum, bytes) => sum + bytes);
    const memory = packed.memory.map((differences) => {
      const now = data.categories.map(() => 0);
      return differences && differences.map((row) => row.map((difference, index) => (now[index] += difference)));
    });
    const sums = memory.map((frames) => frames && frames.map(total));
    return {
      name, about, beginning: captions[0], units, sharded, states, crossing, operations, memory, sums, places, peaks, curve,
      bars: packed.is_after ? "after this operation, or at its highest while it computes" : "at its highest around this operation",
      flights: flights.map((index) => (index === null ? null : operations[index])),
    };
  }

  // ---- state: one moment for both panes
  const cases = data.cases.map(unfold), note = find(".anatomy-note");
  data.left_out.forEach(([name, why]) => block("p", "", note, `There is no picture of ${name}: ${why}.`));
  if (data.ranks.length < data.num_ranks)
    block("p", "", note, `Drawn are ranks 0 to ${data.ranks.length - 2} and the last one of ${data.num_ranks}.`);
  if (cases.length === 0) return;
  const scale = Math.max(1, ...cases.flatMap((one) => [...one.peaks, ...(one.curve ? one.curve[1] : [])]));
  const scrubber = find(".anatomy-scrubber"), position = find(".anatomy-position"), playButton = find("[data-do=play]");
  const state = { moments: [0], moment: 0, timer: null, speed: 1 };
  const now = () => state.moments[state.moment];
  const numUntil = (places, end) => places.filter((place) => place <= end).length;
  const frameOf = (pane) => numUntil(pane.shown.places, now()) - 1;

  const first = home.querySelector(".anatomy-pane"), second = first.cloneNode(true);
  second.querySelector("select").ariaLabel = "Strategy of the second picture";
  first.after(second);
  const panes = [first, second].map((element, index) => {
    const wanted = cases.findIndex((one) => one.name === ["ddp", "fsdp"][index]);
    const shown = cases[wanted >= 0 ? wanted : Math.min(index, cases.length - 1)], select = find("select", element);
    cases.forEach((one) => select.add(new Option(one.name, one.name, false, one === shown)));
    const ring = ringPicture(find(".anatomy-ring", element)), caption = find(".anatomy-caption", element);
    const pane = { element, shown, pictures: [], ring, caption };
    select.addEventListener("change", () => { pane.shown = cases[select.selectedIndex]; retime(); });
    return pane;
  });

  // The moments are the frames of both panes. Choosing another strategy keeps the place in the step.
  function retime() {
    const place = now();
    state.moments = [...new Set(panes.flatMap((pane) => pane.shown.places))].sort((one, other) => one - other);
    state.moment = numUntil(state.moments, place) - 1;
    scrubber.max = state.moments.length - 1;
    rebuild();
  }
  function rebuild() {
    for (const { element, shown, ring, pictures } of panes) {
      pictures.splice(0, pictures.length,
        ranksPicture(find(".anatomy-ranks", element), shown),
        memoryPicture(find(".anatomy-memory", element), shown, scale),
        curvePicture(find(".anatomy-curve", element), shown, scale, last(state.moments)));
      ring.rebuild();
      find(".anatomy-about", element).textContent = shown.about;
      find(".anatomy-bars", element).textContent = shown.bars;
    }
    draw();
  }
  function draw() {
    scrubber.value = state.moment;
    position.textContent = `${state.moment} of ${state.moments.length - 1}`;
    for (const pane of panes) {
      const frame = frameOf(pane), op = pane.shown.operations[frame - 1], [title, text, small] = pane.caption.children;
      pane.pictures.forEach((picture) => picture(frame, now()));
      pane.ring.show(pane.shown.flights[frame], state.timer && COLLECTIVE_MS / state.speed);
      title.textContent = op ? op.title : "the step begins";
      text.textContent = op ? op.caption : pane.shown.beginning;
      const when = op ? `, ${(op.micros / 1000).toFixed(1)} ms into the step` : "";
      small.textContent = `operation ${frame} of ${pane.shown.operations.length}${when}`;
      pane.caption.classList.toggle("earlier", pane.shown.places[frame] < now());
    }
  }
  let settling = 0;
  function go(moment) {
    state.moment = Math.max(0, Math.min(state.moments.length - 1, moment));
    home.classList.add("moving");
    clearTimeout(settling);
    if (!state.timer) settling = setTimeout(() => home.classList.remove("moving"), MOMENT_MS);
    draw();
  }
  function play(isOn) {
    clearTimeout(state.timer);
    state.timer = null;
    if (isOn && state.moment === state.moments.length - 1) state.moment = 0;
    if (isOn) state.timer = setTimeout(advance, 0);
    home.classList.toggle("moving", isOn);
    home.classList.toggle("playing", isOn);
    playButton.setAttribute("aria-label", isOn ? "Pause" : "Play");
    for (const { caption, ring } of panes) {
      caption.setAttribute("aria-live", isOn ? "off" : "polite");
      if (!isOn) ring.stop();
    }
  }
  function advance() {
    if (state.moment === state.moments.length - 1) return play(false);
    go(state.moment + 1);
    const sends = panes.some((pane) => {
      const frame = frameOf(pane), op = pane.shown.operations[frame - 1];
      return op && SENDS.includes(op.kind) && pane.shown.places[frame] === now();
    });
    state.timer = setTimeout(advance, (sends ? COLLECTIVE_MS : MOMENT_MS) / state.speed);
    return undefined;
  }

  const ACTIONS = {
    back: () => { play(false); go(state.moment - 1); },
    on: () => { play(false); go(state.moment + 1); },
    play: () => play(!state.timer),
  };
  for (const [name, action] of Object.entries(ACTIONS)) find(`[data-do=${name}]`).addEventListener("click", action);
  scrubber.addEventListener("input", () => { play(false); go(Number(scrubber.value)); });
  find(".anatomy-speed").addEventListener("change", (event) => (state.speed = Number(event.target.value)));
  // Keys work wherever the focus is and do not scroll the page, unless the focused element uses the key itself.
  const OWNERS = { " ": "select, button, summary, a", ArrowLeft: "select, input, .scroll, .window" };
  OWNERS.ArrowRight = OWNERS.ArrowLeft;
  document.addEventListener("keydown", (event) => {
    const action = { " ": ACTIONS.play, ArrowRight: ACTIONS.on, ArrowLeft: ACTIONS.back }[event.key];
    const isTaken = event.ctrlKey || event.metaKey || event.altKey || event.shiftKey;
    if (!action || isTaken || (event.target.matches && event.target.matches(OWNERS[event.key]))) return;
    event.preventDefault();
    action();
  });
  // Text must not shrink with a picture, so pictures are redrawn for the available width.
  let width = 0;
  home.classList.add("ready");
  retime();
  // A link can name a moment: report.html#anatomy-31.
  const linked = /^#anatomy-(\d+)$/.exec(location.hash);
  if (linked) go(Number(linked[1]));
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width < 200 || contentRect.width === width) return;
    width = contentRect.width;
    rebuild();
  }).observe(panes[0].element);
})();
