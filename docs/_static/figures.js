// Draw the figures of a lab from the data that stand next to their places.  On a narrow screen a figure keeps a width at
// which its words do not overlap, and scrolls.
for (const data of document.querySelectorAll(".lab-figure-data")) {
  const figure = JSON.parse(data.textContent);
  const layout = { ...figure.layout, autosize: true };
  delete layout.width;
  const axes = Object.keys(layout).filter((key) => key.startsWith("xaxis"));
  const columns = new Set(axes.map((key) => (layout[key].domain || [0])[0])).size;
  const least = Math.max(480, 240 * columns);
  const isNarrow = document.getElementById(data.dataset.for).clientWidth < Math.min(least, 720);
  if (isNarrow) Object.assign(layout, { width: least, autosize: false, dragmode: false });
  Plotly.newPlot(data.dataset.for, figure.data, layout, {
    responsive: !isNarrow,
    displaylogo: false,
    displayModeBar: isNarrow ? false : "hover",
  });
}
