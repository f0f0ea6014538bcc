"""PAC+: every table and figure whose numbers can be simulated from sizes, or executed small."""

from workbench.reproduce.items import Item

_HERE = "workbench.reproduce.pac_plus"

ITEMS = (
    Item(name="fig3", title="FLOPs of the fine-tuning techniques", source="counted", module=f"{_HERE}.fig3"),
    Item(name="table1", title="Memory footprint of T5-Large", source="counted", module=f"{_HERE}.table1"),
    Item(name="table5", title="Training durations in Env. A", source="simulated", module=f"{_HERE}.table5"),
    Item(name="table6", title="Performance of the techniques", source="executed", module=f"{_HERE}.executed_techniques"),
    Item(name="parity", title="Where parity with LoRA holds", source="executed", module=f"{_HERE}.executed_parity"),
    Item(name="fig12", title="PAC+, PAC+ (Homo), Asteroid and HetPipe in Env. B", source="simulated", module=f"{_HERE}.fig12"),
    Item(name="fig13", title="Time and memory of the techniques on 8 Nano-H", source="simulated", module=f"{_HERE}.fig13"),
    Item(name="fig14", title="Initialization of the Parallel Adapters", source="executed", module=f"{_HERE}.executed_initialization"),
    Item(name="fig15", title="Memory with a quantized backbone", source="counted", module=f"{_HERE}.fig15"),
    Item(name="table7", title="Performance with a quantized backbone", source="executed", module=f"{_HERE}.executed_precision"),
    Item(name="fig16", title="Scaling from 2 to 8 Nano-H", source="simulated", module=f"{_HERE}.fig16"),
    Item(name="fig17", title="Device groupings on 2 to 8 Nano-H", source="simulated", module=f"{_HERE}.fig17"),
    Item(name="fig18", title="Epochs with and without the activation cache", source="simulated", module=f"{_HERE}.fig18"),
    Item(name="fig18-executed", title="Epochs with and without the cache", source="executed", module=f"{_HERE}.executed_cache"),
)
