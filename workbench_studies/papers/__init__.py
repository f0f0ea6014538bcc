"""Reproductions of the papers' tables and figures: the paper's values, ours, the deviation and the reason."""

from workbench_studies.papers.items import COMPARE, PAPERS, Item, find_item, items_of
from workbench_studies.papers.result import OOM, Check, Comparison, Result, Settings, Table
