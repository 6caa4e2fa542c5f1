"""A shop's database, asked in SQL: agentloop train shop"""

import random
import sqlite3
from contextlib import closing

import agentloop
from agentloop.environments.examples.teachers import SHOP_QUERIES, Novice

QUESTIONS = (
    "What does the {item} cost?",
    "How many of the {item} are there?",
    "What are all of the {item} worth?",
    "How many things cost more than the {item}?",
)
ITEMS = ("bag", "bell", "desk", "drum", "hat", "lamp", "pan", "rug", "sofa", "vase")
MAY = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


class Shop:
    def __init__(self, rows: list[tuple[str, int, int]]) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE items (name, price, number)")
        self.database.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
        # The model's SQL runs in this process: it may read these rows, in little time and memory.
        self.database.set_authorizer(lambda action, *_: int(action not in MAY))
        self.database.set_progress_handler(lambda: 1, 100_000)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)

    def query(self, sql: str) -> str:
        """Run SQL on the table items (name, price, number)."""
        return "\n".join(
            ", ".join(map(str, row)) for row in self.database.execute(sql).fetchmany(20)
        )


def make_task(rng: random.Random) -> dict[str, object]:
    rows = [(item, rng.randint(2, 99), rng.randint(2, 99)) for item in rng.sample(ITEMS, 6)]
    kind, item = rng.randrange(len(QUESTIONS)), rng.choice(rows)[0]
    shop = Shop(rows)
    with closing(shop.database):
        answer = shop.query(SHOP_QUERIES[kind].format(item=item))
    return {
        "prompt": QUESTIONS[kind].format(item=item),
        "answer": answer,
        "kind": kind,
        "item": item,
        "rows": rows,
    }


@agentloop.environment(tasks=make_task, teacher=Novice)
async def ask(task: agentloop.Task, agent: agentloop.Agent) -> agentloop.Trajectory:
    shop = Shop(task.rows)
    with closing(shop.database):
        return await agent.run(task.prompt, tools=[shop.query])  # its answer is checked
