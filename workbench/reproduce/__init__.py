"""The papers' tables and figures again: paper, ours, deviation and why."""

from workbench.reproduce.items import PAPERS, Item, find_item, items_of
from workbench.reproduce.result import OOM, Check, Comparison, Result, Settings, Table
