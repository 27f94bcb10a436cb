"""A text game of several turns: `rollout.agent: configs.treasure.agent:agent` (docs/agents.md).

A map has 6 x 6 places, a1 to f6. The player is told where it stands and where the treasure is, and walks: n, s, e or w.
After each move it is told where it stands, and no more. It wins if it gets there with at most SPARE moves too many.
"""

from dynamo_megatron.agents.gym import gym_agent

SIDE, SPARE = 6, 2
MOVES = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}


def place(name: str) -> tuple[int, int]:
    return "abcdef".index(name[0]), int(name[1]) - 1


def name(at: tuple[int, int]) -> str:
    return "abcdef"[at[0]] + str(at[1] + 1)


def distance(at: tuple[int, int], to: tuple[int, int]) -> int:
    return abs(at[0] - to[0]) + abs(at[1] - to[1])


def moved(at: tuple[int, int], move: str) -> tuple[int, int]:
    """Where a move leads: nowhere, if it is none, or at the edge of the map."""
    east, north = MOVES.get(move, (0, 0))
    to = at[0] + east, at[1] + north
    return to if min(to) >= 0 and max(to) < SIDE else at


class Treasure:
    """An environment with Gymnasium's `reset` and `step`. `options` of reset: start and treasure, names of places."""

    def reset(self, *, seed=None, options=None):
        self.at, self.treasure = place(options["start"]), place(options["treasure"])
        self.moves = distance(self.at, self.treasure) + SPARE  # that are left
        return "", {}  # the row's text says it

    def step(self, action):
        self.at, self.moves = moved(self.at, action), self.moves - 1
        won = self.at == self.treasure
        return name(self.at), float(won), won, self.moves == 0, {}


agent = gym_agent(Treasure, max_tokens=2)  # a move, and the end of the answer
