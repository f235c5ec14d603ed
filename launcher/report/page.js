const OPTIONS = {
  responsive: true, displaylogo: false,
  modeBarButtons: [["toImage", "resetScale2d"]],
};

// What the layouts of all plots share; the legend is below the axes and covers no data.
const AXIS = { gridcolor: "#e5e7eb", zerolinecolor: "#cbd5e1", linecolor: "#cbd5e1", automargin: true };
const FONT = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif", size: 13, color: "#1f2937" };
const TEMPLATE = { layout: {
  margin: { l: 64, r: 20, t: 30, b: 56 }, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", font: FONT,
  hoverlabel: { align: "left", bgcolor: "#ffffff", font: { size: 13, color: FONT.color } },
  legend: { traceorder: "normal", orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left" },
  xaxis: { ...AXIS, title: { standoff: 10 } }, yaxis: { ...AXIS, title: { standoff: 8 } },
} };

function drawn(plot) { return document.querySelector(`.plot[data-plot="${plot}"]`); }

// Buttons beside a plot's title: one group for the kind of curves, one for the x axis.
function buttons(place, names, chosen, act) {
  const group = document.createElement("span");
  group.className = "group";
  for (const name of names) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.setAttribute("aria-pressed", name === chosen);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", other === button);
      act(name);
    });
    group.append(button);
  }
  place.append(group);
}

FIGURES.forEach((figure, number) => {
  const place = drawn(number);
  Plotly.newPlot(place, figure.data, { ...figure.layout, template: TEMPLATE }, OPTIONS);
  const choices = document.querySelector(`.choices[data-of="${number}"]`);
  const kinds = [...new Set(figure.data.map((trace) => trace.meta).filter(Boolean))];
  if (kinds.length > 1) {
    buttons(choices, kinds, kinds[0], (kind) => {
      const y = (kind === "smoothed" ? "training loss, smoothed" : kind) + " (mean over items)";
      Plotly.update(place, { visible: figure.data.map((trace) => trace.meta === kind) }, { "yaxis.title.text": y, "yaxis.autorange": true });
    });
  }
  const along = Object.keys(figure.choices);
  if (along.length) {
    buttons(choices, along, along[0], (name) => {
      const choice = figure.choices[name];
      Plotly.update(place, { x: choice.x }, { "xaxis.title.text": choice.title, "xaxis.autorange": true });
    });
  }
});

// Each run is a <tbody>: a row of figures and, below it, a row with remarks.
const runs = document.querySelector("#runs");
document.querySelectorAll("#runs thead th").forEach((head, column) => {
  head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    document.querySelectorAll("#runs thead th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (body) => body.rows[0].children[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // unknown values stay last
      const order = column < 2 ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return down ? -order : order;
    };
    runs.append(...[...runs.tBodies].sort(compare));
  });
});

for (const when of ["beforeprint", "afterprint"]) {
  addEventListener(when, () => document.querySelectorAll(".plot").forEach((place) => Plotly.Plots.resize(place)));
}
