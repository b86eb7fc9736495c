"use strict";
// Draws the page's curves when they come into sight. All of its data are in the page; nothing is fetched.
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const LIGHT = ["#2f6fb3", "#d1662b", "#2f8f6b", "#a5408f", "#8a6d1f", "#5a55c4", "#c23d55", "#3b8ea5"];
  const DARK = ["#6ea8e0", "#f0935c", "#5cc29a", "#d886c6", "#d0b154", "#9a96f0", "#ef8296", "#79c3d6"];
  const colour = (i) => (dark.matches ? DARK : LIGHT)[i % LIGHT.length];
  const log = document.getElementById("log"), smooth = document.getElementById("smooth"), shown = document.getElementById("smooth-value");
  const drawn = new Set();
  // plotly.js takes some of HTML for markup, links among it: a name of a run is text.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  async function library() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const script = document.createElement("script");
    script.textContent = text;
    document.head.append(script);
  }

  // Exponential average whose weight falls with the distance in steps, without a pull towards 0 at the begin.
  function smoothed(x, y, share) {
    if (share <= 0 || y.length < 3) return y;
    const span = (share * share * (x[x.length - 1] - x[0])) / 4 || 1;
    let sum = 0, weight = 0, last = x[0];
    return y.map((value, i) => {
      const keep = Math.exp(-(x[i] - last) / span);
      last = x[i];
      sum = sum * keep + value * (1 - 1 / Math.E);
      weight = weight * keep + (1 - 1 / Math.E);
      return Number((sum / weight).toPrecision(6));
    });
  }

  function layout(more) {
    const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--soft").trim(), line = style.getPropertyValue("--line").trim();
    return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12, family: "system-ui, sans-serif" },
      margin: { l: 56, r: 12, t: 8, b: 34 }, showlegend: false, hovermode: "x unified", hoverlabel: { namelength: -1, bgcolor: style.getPropertyValue("--card").trim() },
      xaxis: { gridcolor: line, zeroline: false, automargin: true }, yaxis: { gridcolor: line, zeroline: false, type: log.checked ? "log" : "linear", automargin: true },
      shapes: more || [] };
  }

  function traces(chart) {
    const several = data.runs.length > 1, share = Number(smooth.value), found = [];
    for (const curve of chart.curves) {
      const test = curve.split === "test", other = curve.split === "expected", tint = colour(several ? curve.run : test ? 1 : other ? 6 : 0);
      const name = plain((several ? data.runs[curve.run] + " · " : "") + curve.split);
      const mode = curve.x.length < (test ? 80 : 3) ? "lines+markers" : "lines";
      if (curve.split === "train" && share > 0 && curve.x.length > 2) {
        found.push({ x: curve.x, y: curve.y, mode, name, hoverinfo: "skip", opacity: 0.28, line: { color: tint, width: 1 } });
        found.push({ x: curve.x, y: smoothed(curve.x, curve.y, share), mode, name, line: { color: tint, width: 2 }, hovertemplate: "%{y:.5g}" });
      } else
        found.push({ x: curve.x, y: curve.y, mode, name, hovertemplate: "%{y:.5g}", line: { color: tint, width: test ? 2 : 1.4, dash: (several && test) || other ? "dot" : "solid" }, marker: { size: 6, color: tint } });
    }
    return found;
  }

  // Parallel coordinates: an axis for each field, a line for each run, from the worst (pale) to the best.
  function parallel(chart) {
    const scores = chart.dimensions[chart.dimensions.length - 1].at, order = chart.names.map((_, i) => i).sort((a, b) => chart.sign * (scores[a] - scores[b]));
    return order.map((i, rank) => ({ x: chart.dimensions.map((_, k) => k), y: chart.dimensions.map((d) => d.at[i]), mode: "lines+markers", name: plain(chart.names[i]),
      text: chart.dimensions.map((d) => plain(d.label + " " + d.texts[i])), hovertemplate: "%{text}<extra>%{fullData.name}</extra>", marker: { size: 6 },
      opacity: 0.25 + (0.75 * rank) / Math.max(order.length - 1, 1), line: { shape: "spline", smoothing: 0.6, width: 1 + (2 * rank) / order.length, color: colour(rank > 0.75 * order.length ? 2 : 0) } }));
  }
  function axes(chart) {
    const l = layout(), notes = [];
    chart.dimensions.forEach((d, k) => d.ticks.forEach(([at, text]) => notes.push({ x: k, y: at, text: plain(text), showarrow: false, xanchor: "left", xshift: 6, font: { size: 11 } })));
    return { ...l, hovermode: "closest", margin: { l: 30, r: 70, t: 14, b: 34 }, annotations: notes, yaxis: { visible: false, range: [-0.06, 1.06] },
      xaxis: { tickvals: chart.dimensions.map((_, k) => k), ticktext: chart.dimensions.map((d) => plain(d.label)), gridcolor: l.xaxis.gridcolor, gridwidth: 2, zeroline: false, fixedrange: true } };
  }

  function draw(place) {
    const chart = data.charts[Number(place.dataset.chart)];
    const options = { displayModeBar: false, responsive: true };
    if (chart.kind === "parallel") {
      Plotly.react(place, parallel(chart), axes(chart), options);
    } else {
      const line = (step, dash, i) => ({ type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, opacity: 0.45, line: { width: 1, dash, color: colour(i) } });
      const marks = [...(chart.restarts || []).map((step) => line(step, "dot", 6)), ...(chart.spikes || []).map((step) => line(step, "dash", 1))];
      const shown = layout(marks), first = chart.curves[0].y[0];
      // A small constant would else be drawn as 0, between -1 and 1.
      if (first && !log.checked && chart.curves.every((curve) => curve.y.every((y) => y === first))) shown.yaxis.range = [Math.min(0, 2 * first), Math.max(0, 2 * first)];
      Plotly.react(place, traces(chart), shown, options);
    }
    drawn.add(place);
    document.documentElement.dataset.drawn = drawn.size;
  }

  const places = [...document.querySelectorAll(".chart")];
  const again = () => drawn.forEach(draw);
  if (log) log.addEventListener("change", again);
  if (smooth) smooth.addEventListener("input", () => { shown.textContent = Math.round(100 * smooth.value) + " %"; again(); });
  dark.addEventListener("change", again);

  // Keys on a chart that has the focus: arrows move, + and - zoom, 0 shows all.
  for (const place of places)
    place.addEventListener("keydown", (event) => {
      const axis = place._fullLayout && place._fullLayout.xaxis;
      if (!axis || data.charts[Number(place.dataset.chart)].kind) return;
      const [a, b] = axis.range, width = b - a;
      const to = { ArrowLeft: [a - width / 8, b - width / 8], ArrowRight: [a + width / 8, b + width / 8], "+": [a + width / 6, b - width / 6],
        "=": [a + width / 6, b - width / 6], "-": [a - width / 4, b + width / 4] }[event.key];
      if (to) Plotly.relayout(place, { "xaxis.range": to });
      else if (event.key === "0") Plotly.relayout(place, { "xaxis.autorange": true, "yaxis.autorange": true });
      else return;
      event.preventDefault();
    });

  for (const slider of document.querySelectorAll("input[data-steps]")) {
    const sets = [...document.getElementById(slider.dataset.steps).children], told = document.getElementById(slider.dataset.steps + "-value");
    const show = () => {
      sets.forEach((set, i) => { set.hidden = i !== Number(slider.value); });
      told.textContent = sets[Number(slider.value)].dataset.name;
      slider.setAttribute("aria-valuetext", told.textContent);
    };
    slider.addEventListener("input", show);
    show();
  }

  // Served by jaxtrain watch: asks whether there is a newer page, and shows it with the axes, smoothing and place as they are.
  const every = Number(document.documentElement.dataset.every || 0);
  if (every) {
    const told = document.getElementById("live"), kept = JSON.parse(sessionStorage.getItem("shown") || "null");
    if (kept && log) [log.checked, smooth.value] = [kept.log, kept.smooth];
    if (kept) requestAnimationFrame(() => scrollTo(0, kept.y));
    if (smooth) shown.textContent = Math.round(100 * smooth.value) + " %";
    setInterval(async () => {
      try {
        const answer = await fetch("version"), version = await answer.text();
        if (!answer.ok) throw new Error(version);
        told.textContent = "live, asked at " + new Date().toLocaleTimeString();
        if (version === document.documentElement.dataset.version) return;
        sessionStorage.setItem("shown", JSON.stringify({ log: log && log.checked, smooth: smooth && smooth.value, y: scrollY }));
        location.reload();
      } catch (error) {
        told.textContent = "not current: " + (error.message || "jaxtrain watch does not answer");
      }
    }, 1000 * every);
  }

  if (!places.length) return;
  await library();
  if (location.hash === "#all") places.forEach(draw);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }, { rootMargin: "300px" });
  places.forEach((place) => seen.observe(place));
  for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", () => fold.querySelectorAll(".chart").forEach((p) => drawn.has(p) || draw(p)));
  addEventListener("beforeprint", () => places.forEach((place) => drawn.has(place) || draw(place)));
})();
