from statebackend._core.entry_rows import EntryRows
from statebackend._core.state_core import Mark
from statebackend._core.state_table import StateTable

def changed_entries(table: StateTable, mark: Mark) -> EntryRows: ...
