const OPTIONS = {
  responsive: true, displaylogo: false,
  modeBarButtons: [["toImage", "resetScale2d"]],
};
const DARK = matchMedia("(prefers-color-scheme: dark)");
const NARROW = matchMedia("(max-width: 600px)");
const PRINTED_PX = 660; // a page of A4 or letter paper is a little wider

// What the layouts of all plots share; the legend is below the axes and covers no data.
function template(dark) {
  const title = { font: { size: NARROW.matches ? 11 : 14 } };
  const ink = dark ? "#e5e9f0" : "#1f2937";
  const paper = dark ? "#182234" : "#ffffff";
  const line = dark ? "#4a5a73" : "#cbd5e1";
  const axis = { gridcolor: dark ? "#2c3a52" : "#e5e7eb", zerolinecolor: line, linecolor: line, automargin: true };
  const family = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif";
  return { layout: {
    margin: { l: 64, r: 20, t: 30, b: 56 }, paper_bgcolor: paper, plot_bgcolor: paper, font: { family, size: NARROW.matches ? 11 : 13, color: ink },
    hoverlabel: { align: "left", bgcolor: paper, font: { size: 13, color: ink } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink },
    legend: { traceorder: "normal", orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left" },
    xaxis: { ...axis, title: { ...title, standoff: 10 } }, yaxis: { ...axis, title: { ...title, standoff: 8 } },
  } };
}

function drawn(plot) { return document.querySelector(`.plot[data-plot="${plot}"]`); }

// A group of buttons beside a plot's title.
function buttons(place, names, act) {
  const group = document.createElement("span");
  group.className = "group";
  group.role = "group";
  names.forEach((name, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.setAttribute("aria-pressed", number === 0);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", other === button);
      act(name);
    });
    group.append(button);
  });
  place.append(group);
}

// A long legend is below the plot, not in its place. On a phone, the names of bars have several lines, and so leave room
// for the bars.
function fitted(figure, place) {
  const layout = { ...figure.layout };
  const entries = layout.showlegend ? figure.data.filter((trace) => trace.visible !== false && trace.showlegend !== false).length : 0;
  if (entries > 6 && place.clientWidth < 1000) layout.height += 19 * (entries - 4);
  const labels = layout.yaxis.ticktext;
  if (!labels || !NARROW.matches) return layout;
  const ticktext = labels.map((label) => label.trim().replace(/ /g, "<br>"));
  const lines = Math.max(...ticktext.map((label) => label.split("<br>").length));
  const height = Math.max(layout.height, 130 + labels.length * 13 * lines);
  return { ...layout, height, yaxis: { ...layout.yaxis, ticktext, tickfont: { size: 10 } } };
}

function draw(figure, number) {
  const place = drawn(number);
  for (const group of figure.choices) {
    const [data] = Object.values(group)[0];
    for (const [key, values] of Object.entries(data)) figure.data.forEach((trace, n) => { trace[key] = values[n]; });
  }
  const layout = fitted(figure, place);
  Plotly.newPlot(place, figure.data, { ...layout, template: template(DARK.matches) }, OPTIONS);
  const choices = document.querySelector(`.choices[data-of="${number}"]`);
  for (const group of figure.choices) {
    const names = Object.keys(group);
    if (names.length > 1) buttons(choices, names, (name) => Plotly.update(place, ...group[name]));
  }
}

function paint(dark, size) {
  document.querySelectorAll(".plot").forEach((place) => Plotly.relayout(place, { template: template(dark), ...size }));
}

if (typeof Plotly !== "undefined") {
  document.querySelector("#no-plots").remove();
  FIGURES.forEach(draw);
  DARK.addEventListener("change", () => paint(DARK.matches));
  addEventListener("beforeprint", () => paint(false, { autosize: false, width: PRINTED_PX }));
  addEventListener("afterprint", () => paint(DARK.matches, { autosize: true, width: null }));
}

// Each run is a <tbody>: a row of figures and, below it, a row with remarks.
const runs = document.querySelector("#runs");
document.querySelectorAll("#runs thead th").forEach((head, column) => {
  head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    document.querySelectorAll("#runs thead th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const text = (body) => (({ dataset, textContent }) => dataset.value ?? textContent)(body.rows[0].children[column]);
    const compare = (a, b) => {
      if (column < 2) return (down ? -1 : 1) * text(a).localeCompare(text(b), undefined, { numeric: true });
      const [x, y] = [a, b].map((body) => Number.parseFloat(text(body).replace(/,/g, "")));
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // unknown values stay last
      return down ? y - x : x - y;
    };
    runs.append(...[...runs.tBodies].sort(compare));
  });
});
