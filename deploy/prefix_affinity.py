"""The routing rule alone, without Ray: bench/affinity.py simulates it for hundreds of replicas."""
from collections import Counter, OrderedDict
from itertools import count


def beginnings(text, chunk: int) -> list[int]:
    "A number for each beginning of `text` (or of a tuple of token ids), in steps of `chunk`"
    out, last = [], 0
    for i in range(chunk, len(text) + 1, chunk): out.append(last := hash((last, text[i - chunk:i])))
    return out


class Affinity:
    """A prompt goes where most of its beginning went before, unless that replica has `slack` more requests than the
    idlest one has; then, and if it is new, to the idlest."""
    def __init__(self, slack: int = 16, remember: int = 200_000):
        self.slack, self.remember = slack, remember
        self.went, self.last, self.turn = OrderedDict(), {}, count(1)   # beginning -> replicas; when each was chosen

    def order(self, parts: list[int], going: dict) -> list:
        "Replicas by preference for a prompt with these `beginnings`; `going` has the requests under way at each"
        known = Counter(r for b in parts for r in self.went.get(b, ()) if r in going)
        idle = sorted(going, key=lambda r: (going[r], self.last.get(r, 0)))
        best = max(idle, key=known.__getitem__)
        if going[best] - going[idle[0]] > self.slack: best = idle[0]
        self.last[best] = next(self.turn)   # noted now, not when the request has arrived: the next one may be choosing
        for b in parts:
            self.went.setdefault(b, set()).add(best)
            self.went.move_to_end(b)
        while len(self.went) > self.remember: self.went.popitem(last=False)
        return [best, *(r for r in idle if r != best)]
