// Zooms the timelines: sets their width within the window, and draws the axis for that width.
"use strict";
(() => {
  const home = document.getElementById("timeline");
  if (!home) return;
  const pane = home.querySelector(".window"), zoomed = home.querySelector(".zoomed"), axis = home.querySelector(".time-axis");
  const controls = home.querySelector(".zoom"), shown = controls.querySelector("output");
  const MOST = 64, TICK_PIXELS = 130;
  const end = Number(axis.dataset.end), unit = axis.dataset.unit;
  let zoom = 1;

  // Round numbers, far enough apart for their texts.
  function drawAxis() {
    const wide = axis.getBoundingClientRect().width, least = end / Math.max(1, Math.floor(wide / TICK_PIXELS));
    const power = 10 ** Math.floor(Math.log10(least)), step = [1, 2, 2.5, 5, 10].find((one) => one * power >= least) * power;
    const places = Math.max(0, 1 - Math.floor(Math.log10(step)));
    axis.replaceChildren();
    for (let count = 0; count * step <= end * (1 + 1e-9); count += 1) {
      const at = (count * step) / end, text = document.createElementNS("http://www.w3.org/2000/svg", "text");
      text.setAttribute("x", `${100 * at}%`);
      text.setAttribute("y", 13);
      text.setAttribute("class", "tick");
      text.setAttribute("text-anchor", at * wide < 20 ? "start" : (1 - at) * wide < 30 ? "end" : "middle");
      text.textContent = `${Number((count * step).toFixed(places))} ${unit}`;
      axis.append(text);
    }
  }
  // The moment at `x` of the window stays there.
  function zoomTo(wanted, x = pane.clientWidth / 2) {
    const left = pane.clientWidth - axis.getBoundingClientRect().width / zoom;
    const at = (pane.scrollLeft + x - left) / zoom;
    zoom = Math.max(1, Math.min(MOST, wanted));
    zoomed.style.setProperty("--zoom", zoom);
    pane.scrollLeft = at * zoom + left - x;
    shown.textContent = `${Number(zoom.toFixed(1))}×`;
    controls.querySelector("[data-zoom=out]").disabled = controls.querySelector("[data-zoom=fit]").disabled = zoom === 1;
    controls.querySelector("[data-zoom=in]").disabled = zoom === MOST;
    drawAxis();
  }
  const ACTIONS = { in: () => zoomTo(zoom * 2), out: () => zoomTo(zoom / 2), fit: () => zoomTo(1) };
  for (const [name, action] of Object.entries(ACTIONS))
    controls.querySelector(`[data-zoom=${name}]`).addEventListener("click", action);
  document.addEventListener("keydown", (event) => {
    const action = { "+": ACTIONS.in, "=": ACTIONS.in, "-": ACTIONS.out, 0: ACTIONS.fit }[event.key];
    if (!action || event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });
  pane.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomTo(zoom * 2 ** (-event.deltaY / 200), event.clientX - pane.getBoundingClientRect().left);
  }, { passive: false });
  pane.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button || zoom === 1) return;
    const from = event.clientX + pane.scrollLeft;
    const move = (now) => (pane.scrollLeft = from - now.clientX);
    document.addEventListener("pointermove", move);
    document.addEventListener("pointerup", () => document.removeEventListener("pointermove", move), { once: true });
    event.preventDefault();
    pane.focus({ preventScroll: true });
  });
  home.classList.add("ready");
  new ResizeObserver(() => zoomTo(zoom)).observe(pane);
})();
