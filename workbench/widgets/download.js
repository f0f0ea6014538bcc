// A button that asks the kernel for a text and saves it as a file of the reader's computer.

function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  URL.revokeObjectURL(link.href);
}

export default {
  render({ model, el }) {
    const button = document.createElement("button");
    button.className = "jupyter-widgets jupyter-button widget-button workbench-copy";
    button.type = "button";
    button.textContent = model.get("label");
    button.title = model.get("hint");
    const said = document.createElement("span");
    said.setAttribute("role", "status");
    button.addEventListener("click", () => {
      said.textContent = " …";
      model.send({ kind: "asked" });
    });
    const received = (message) => {
      save(message.name, message.text);
      said.textContent = ` Saved ${message.name}.`;
    };
    model.on("msg:custom", received);
    el.append(button, said);
    return () => model.off("msg:custom", received);
  },
};
