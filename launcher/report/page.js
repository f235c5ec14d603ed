const OPTIONS = {
  responsive: true, displaylogo: false,
  modeBarButtons: [["toImage", "resetScale2d"]],
};

function drawn(plot) { return document.querySelector(`.plot[data-plot="${plot}"]`); }

// Buttons beside a plot's title: one group of them for the x axis, one for which curves show.
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
  Plotly.newPlot(place, figure.data, figure.layout, OPTIONS);
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

// A run is a body of its own: its figures, and under them, over the whole width, why it has no more.
const runs = document.querySelector("#runs");
document.querySelectorAll("#runs thead th").forEach((head, column) => {
  head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    document.querySelectorAll("#runs thead th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (body) => body.rows[0].children[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === ""); // what is not known stays last
      const order = column < 2 ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return down ? -order : order;
    };
    runs.append(...[...runs.tBodies].sort(compare));
  });
});

for (const when of ["beforeprint", "afterprint"]) {
  addEventListener(when, () => document.querySelectorAll(".plot").forEach((place) => Plotly.Plots.resize(place)));
}
