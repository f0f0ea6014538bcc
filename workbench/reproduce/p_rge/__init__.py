"""P-RGE: every table and figure whose numbers can be simulated from sizes, or executed small."""

from workbench.reproduce.items import Item

_HERE = "workbench.reproduce.p_rge"

ITEMS = (
    Item(name="table1", title="Trade-offs of several queries at one budget", source="simulated", module=f"{_HERE}.table1"),
    Item(name="table2", title="Accuracy by number of queries at one budget", source="executed", module=f"{_HERE}.executed_table2"),
    Item(name="table2-long", title="Beside it: a longer training", source="executed", module=f"{_HERE}.executed_long"),
    Item(name="table2-references", title="Beside it: first-order and others", source="executed", module=f"{_HERE}.executed_references"),
    Item(name="table3", title="Peak memory of first-order, MeZO and P-RGE steps", source="counted", module=f"{_HERE}.table3"),
    Item(name="fig4", title="End-to-end speedup over MeZO", source="simulated", module=f"{_HERE}.fig4"),
    Item(name="table4", title="Steps on a Jetson Orin Nano with NF4 weights", source="simulated", module=f"{_HERE}.table4"),
    Item(name="table5", title="The dual-forwarding program on a phone's NPU", source="simulated", module=f"{_HERE}.table5"),
    Item(name="table6", title="MeZO's sweeps over all parameters against SGD", source="simulated", module=f"{_HERE}.table6"),
    Item(name="table7", title="LoRA, LoRA-FA, DoRA, VeRA by forward passes", source="executed", module=f"{_HERE}.executed_table7"),
    Item(name="fig5", title="Padding by batch size", source="counted", module=f"{_HERE}.fig5"),
    Item(name="table12", title="Outer-loop parallelization at one total batch", source="simulated", module=f"{_HERE}.table12"),
    Item(name="table13", title="Inner-loop parallelization", source="simulated", module=f"{_HERE}.table13"),
    Item(name="fig6", title="Inner-loop parallelization by storage of the weights", source="simulated", module=f"{_HERE}.fig6"),
    Item(name="table15", title="Minutes of fine-tuning TinyLlama-1.1B by task", source="simulated", module=f"{_HERE}.table15"),
    Item(name="table16", title="Minutes of fine-tuning Llama2-7B by task", source="simulated", module=f"{_HERE}.table16"),
    Item(name="table17", title="Peak memory of TinyLlama-1.1B by task", source="simulated", module=f"{_HERE}.table17"),
    Item(name="table18", title="Peak memory of Llama2-7B by task", source="simulated", module=f"{_HERE}.table18"),
)
