// Brings the code of plotly's widget to a page, for all figures of the same version (figure_box.js).

export default {
  async initialize({ model }) {
    const url = URL.createObjectURL(new Blob([model.get("code")], { type: "text/javascript" }));
    const { default: widget } = await import(url);
    URL.revokeObjectURL(url);
    const widgets = (globalThis.workbenchPlotly ??= new Map());
    widgets.set(model.get("version"), widget);
    document.dispatchEvent(new Event("workbench-plotly"));
  },
};
