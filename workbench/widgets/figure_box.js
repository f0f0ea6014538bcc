// Plotly's widget by the code that another model brings (plotly_code.js).  Until it is there, messages to the figure wait.

export default async () => {
  const widget = () => globalThis.workbenchPlotly?.get("VERSION");
  while (!widget()) await new Promise((resolve) => document.addEventListener("workbench-plotly", resolve, { once: true }));
  return widget()();
};
