"""A shop's database, asked in SQL: agentloop train shop"""

import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing

import agentloop

QUERIES = {
    "What does the {item} cost?": "SELECT price FROM items WHERE name = '{item}'",
    "How many of the {item} are there?": "SELECT number FROM items WHERE name = '{item}'",
    "What are all of the {item} worth?": "SELECT price * number FROM items WHERE name = '{item}'",
    "How many things cost more than the {item}?": "SELECT count(*) FROM items "
    "WHERE price > (SELECT price FROM items WHERE name = '{item}')",
}
ITEMS = ("bag", "bell", "desk", "drum", "hat", "lamp", "pan", "rug", "sofa", "vase")
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


class Shop:
    def __init__(self, rows: Sequence[Sequence[str | int]]) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE items (name, price, number)")
        self.database.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
        # The model's SQL runs in this process, so it may only read, and not for long.
        self.database.set_authorizer(lambda action, *_: int(action not in ALLOWED))
        self.database.set_progress_handler(lambda: 1, 10_000)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000)

    def query(self, sql: str) -> str:
        """Run SQL on the table items (name, price, number)."""
        return "\n".join(", ".join(map(str, row)) for row in self.database.execute(sql))

    def close(self) -> None:
        self.database.close()


def make_task(rng: random.Random) -> dict[str, object]:
    rows = [(item, rng.randint(2, 99), rng.randint(2, 99)) for item in rng.sample(ITEMS, 6)]
    item = rng.choice(rows)[0]
    question, sql = (text.format(item=item) for text in rng.choice(list(QUERIES.items())))
    with closing(Shop(rows)) as shop:
        answer = shop.query(sql)
    return {"prompt": question, "answer": answer, "sql": sql, "item": item, "rows": rows}


def teacher(task: agentloop.Task, rng: random.Random) -> Callable[..., agentloop.Message | str]:
    """Return a player that knows the queries, but seldom which of them answers the question."""

    def play(messages: Sequence[agentloop.Message]) -> agentloop.Message | str:
        if messages[-1]["role"] == "tool":
            return rf"\boxed{{{messages[-1]['content']}}}"
        guess = rng.choice(list(QUERIES.values())).format(item=task.item)
        return agentloop.call("query", sql=task.sql if rng.random() < 0.35 else guess)

    return play


@agentloop.environment(tasks=make_task, teacher=teacher)
async def ask(task: agentloop.Task, agent: agentloop.Agent) -> agentloop.Trajectory:
    with closing(Shop(task.rows)) as shop:
        return await agent.run(task.prompt, tools=[shop.query])  # its answer is checked
