"use strict";
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  if (!figures.length) return;
  const say = (text) => document.querySelectorAll(".chart").forEach((chart) => { chart.textContent = text; });
  try {
    const packed = document.getElementById("library");
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    const opened = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(opened).text();
    document.head.append(script);
    packed.remove();
  } catch (error) {
    say("This browser is too old to draw (it has no DecompressionStream).");
    return;
  }

  // "@ink" and its like are colours of the design.
  const inked = (value, colour) => {
    if (typeof value === "string") return value[0] === "@" ? colour(value.slice(1)) : value;
    if (Array.isArray(value)) return value.map((inner) => inked(inner, colour));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, inked(inner, colour)]));
    return value;
  };
  const touch = matchMedia("(pointer: coarse)").matches;
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    const axis = { gridcolor: "@line", linecolor: "@line", zerolinecolor: "@line", tickcolor: "@line", automargin: true };
    for (const { name, data, layout } of figures) {
      const chart = document.getElementById("chart-" + name);
      const narrow = chart.clientWidth < 520;
      const full = {
        font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12, color: "@soft" },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 48, r: 14, t: 8, b: 36 },
        hovermode: "x unified", hoverlabel: { bgcolor: "@card", bordercolor: "@line", font: { color: "@ink" } },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", xanchor: "left" },
        dragmode: touch ? false : "zoom", showlegend: true,
        ...layout,
      };
      if (data.some((trace) => trace.type === "bar")) full.hovermode = "closest";
      for (const key of Object.keys(full))
        if (/^[xy]axis/.test(key)) {
          full[key] = { ...axis, ...(key[0] === "y" ? { fixedrange: true } : { showgrid: false }), ...full[key] };
          if (full[key].title) full[key].title = { standoff: 6, ...full[key].title };
        }
      Plotly.react(chart, inked(data, colour), inked(full, colour), { displayModeBar: false, responsive: true });
    }
  };
  draw();
  document.documentElement.dataset.drawn = "yes";
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
