// Draw the figures of a lab from the data that stand next to their places.
for (const data of document.querySelectorAll(".lab-figure-data")) {
  const figure = JSON.parse(data.textContent);
  const layout = { ...figure.layout, autosize: true };
  delete layout.width;
  Plotly.newPlot(data.dataset.for, figure.data, layout, { responsive: true, displaylogo: false });
}
