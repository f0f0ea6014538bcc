"""Galaxy+: every table and figure of the evaluation, simulated or counted from sizes; re-scheduling executed too."""

from workbench.reproduce.items import Item

_HERE = "workbench.reproduce.galaxy_plus"

ITEMS = (
    Item(name="table1", title="Memory footprint and latency of one token", source="counted", module=f"{_HERE}.table1"),
    Item(name="table2", title="Complexity of both schemes", source="counted", module=f"{_HERE}.table2"),
    Item(name="table5", title="Configurations and speed-ups in Env. A and B", source="simulated", module=f"{_HERE}.table5"),
    Item(name="fig12", title="Speed-ups at 125 to 1000 Mbit/s", source="simulated", module=f"{_HERE}.fig12"),
    Item(name="fig13", title="Jetson Nano and GTX 1080 Ti", source="simulated", module=f"{_HERE}.fig13"),
    Item(name="fig14", title="Weak scaling, to 64 devices", source="simulated", module=f"{_HERE}.fig14"),
    Item(name="fig15", title="Strong scaling, to 64 devices", source="simulated", module=f"{_HERE}.fig15"),
    Item(name="fig16", title="Re-scheduling around a straggler", source="simulated", module=f"{_HERE}.fig16"),
    Item(name="fig16-executed", title="Re-scheduling on emulated devices", source="executed", module=f"{_HERE}.fig16_executed"),
)
