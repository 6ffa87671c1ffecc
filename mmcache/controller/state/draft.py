"""What a transaction makes of a state database."""

from __future__ import annotations

import sqlite3

from mmcache.controller.state.rows import KEYS, Row, State, added, state_row


class Draft:
    """The rows that a transaction writes, whose checksums it adds up. `state` will be the row of `state`."""

    def __init__(self, connection: sqlite3.Connection, state: State) -> None:
        self._connection = connection
        self.state = state

    def put(self, table: str, row: Row) -> None:
        """Write a row, in place of the one with its key."""
        self.drop(table, row[0])
        self._insert(table, row)
        self.state.total = added(self.state.total, row[-1])

    def drop(self, table: str, key: object) -> None:
        """Remove a row, if it is there."""
        found = find(self._connection, "checksum", table, key)
        if found is not None:
            self._delete(table, key)
            self.state.total = added(self.state.total, -found[0])

    def finish(self) -> None:
        """Write the row of `state`, of one commit more."""
        self.state.commits += 1
        self._delete("state", 1)
        self._insert("state", state_row(self.state))

    def _insert(self, table: str, row: Row) -> None:
        self._connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608

    def _delete(self, table: str, key: object) -> None:
        self._connection.execute(f"DELETE FROM {table} WHERE {KEYS[table]} = ?", (key,))  # noqa: S608


def find(connection: sqlite3.Connection, columns: str, table: str, key: object) -> Row | None:
    """The row with a key. Columns and tables are names of the program's own."""
    query = f"SELECT {columns} FROM {table} WHERE {KEYS[table]} = ?"  # noqa: S608
    found: Row | None = connection.execute(query, (key,)).fetchone()
    return found
