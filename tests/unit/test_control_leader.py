"""Two controllers, and those that they are for: whatever is killed, stopped, cut off or late, nobody does what an older one
says after a newer one, one leads soon after either lives, and it goes on."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from cluster.control.leader import BEAT_S, CONFIRM_S, FIRST_WAIT_S, SILENT_S, Follower, Term, decide
from cluster.messages import Follows, Leads
from cluster.types import Generation

TICK_S = 0.05
LATE_S = 0.5
DELAY_S = 0.04
"""A message takes at most so long where nothing is wrong."""
TAKE_OVER_S = 2.0


@dataclass(frozen=True)
class Action:
    """What a controller has somebody do. `generation` is for the test only: it is not looked at."""

    generation: Generation


Said = Leads | Action | Follows


@dataclass
class Wire:
    """One direction of a connection: what is said arrives in order, if it arrives."""

    said: deque[tuple[float, Said]] = field(default_factory=deque)

    def say(self, message: Said, due_s: float) -> None:
        self.said.append((max(due_s, self.said[-1][0] if self.said else 0.0), message))

    def arrived(self, now_s: float) -> list[Said]:
        arrived = []
        while self.said and self.said[0][0] <= now_s:
            arrived.append(self.said.popleft()[1])
        return arrived


@dataclass
class Cable:
    """Between one controller and one follower. What is said while it is cut arrives once it is whole, or never."""

    down: Wire | None = None
    up: Wire | None = None
    cut: bool = False


@dataclass
class Controller:
    term: Term
    words: dict[int, tuple[Follows, float]] = field(default_factory=dict)
    beat_s: float = 0.0
    ticked_s: float = 0.0
    stopped: bool = False


@dataclass
class Peer:
    follower: Follower = field(default_factory=Follower)
    said: Follows = field(default_factory=lambda: Follows(None, heard=False))
    done: list[Generation] = field(default_factory=list)
    refused: int = 0
    listened_s: float = 0.0
    stopped: bool = False


class World:
    """Steps of 50 ms. What controllers and followers do at each is what deployments/controller_{server,link}.py do."""

    def __init__(self, seed: int, controllers: int = 2, peers: int = 3) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.lives = 0
        self.controllers: list[Controller | None] = [None] * controllers
        self.peers = [Peer(listened_s=self.now_s) for _ in range(peers)]
        self.cables = {(c, p): Cable() for c in range(controllers) for p in range(peers)}
        self.led: set[Generation] = set()
        for place in range(controllers):
            self.start(place)

    # --- faults ---

    def start(self, place: int) -> None:
        self.lives += 1
        uuid = f"{self.rng.getrandbits(32):08x}-{self.lives}"
        self.controllers[place] = Controller(Term(place, uuid), ticked_s=self.now_s)

    def kill(self, place: int) -> None:
        self.controllers[place] = None
        for p in range(len(self.peers)):
            if not self.cables[place, p].cut:
                self.end(place, p)

    def renew(self, p: int) -> None:
        """A follower ends, and another begins in its place."""
        for c in range(len(self.controllers)):
            self.end(c, p)
        self.peers[p] = Peer(listened_s=self.now_s)

    def end(self, place: int, p: int) -> None:
        """The connection ends for both."""
        cable = self.cables[place, p]
        if cable.up is None:
            return
        cable.down = cable.up = None
        controller = self.controllers[place]
        if controller is not None:
            controller.words.pop(p, None)
        self.peers[p].follower.lost(place)

    # --- time ---

    def run(self, seconds: float, late_s: float = DELAY_S) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.step(late_s)

    def step(self, late_s: float = DELAY_S) -> None:
        self.now_s += TICK_S
        ends = [(c, p) for c in range(len(self.controllers)) for p in range(len(self.peers))]
        self.rng.shuffle(ends)
        for c, p in ends:
            self._connect(c, p, late_s)
            self._hear(c, p)
        for p in range(len(self.peers)):
            self._listen(p, late_s)
        for c in range(len(self.controllers)):
            self._tick(c, late_s)

    def _due(self, late_s: float) -> float:
        return self.now_s + self.rng.uniform(0, late_s)

    def _connect(self, c: int, p: int, late_s: float) -> None:
        cable, controller, peer = self.cables[c, p], self.controllers[c], self.peers[p]
        if cable.up is not None or cable.cut or controller is None or controller.stopped or peer.stopped:
            return
        cable.down, cable.up = Wire(), Wire()
        cable.up.say(peer.said, self._due(late_s))
        if controller.term.leads is not None:
            cable.down.say(Leads(controller.term.leads), self._due(late_s))

    def _hear(self, c: int, p: int) -> None:
        cable, controller, peer = self.cables[c, p], self.controllers[c], self.peers[p]
        if cable.up is None or cable.down is None or cable.cut:
            return
        if controller is None:  # it was killed while it was cut off
            self.end(c, p)
            return
        if not controller.stopped:
            for word in cable.up.arrived(self.now_s):
                assert isinstance(word, Follows)
                controller.words[p] = (word, self.now_s)
            if p in controller.words and not peer.stopped:  # its reports
                controller.words[p] = (controller.words[p][0], self.now_s)
        if not peer.stopped:
            for message in cable.down.arrived(self.now_s):
                if isinstance(message, Leads):
                    peer.follower.met(c, message.generation, self.now_s)
                elif isinstance(message, Action) and peer.follower.leader == c:
                    peer.done.append(message.generation)
                else:
                    peer.refused += 1

    def _listen(self, p: int, late_s: float) -> None:
        peer = self.peers[p]
        if peer.stopped:
            return
        if self.now_s - peer.listened_s > LATE_S:
            peer.follower.stood_still(self.now_s)
        peer.listened_s = self.now_s
        word = peer.follower.word(self.now_s)
        if word != peer.said:
            peer.said = word
            for c in range(len(self.controllers)):
                up = self.cables[c, p].up
                if up is not None:
                    up.say(word, self._due(late_s))

    def _tick(self, c: int, late_s: float) -> None:
        controller = self.controllers[c]
        if controller is None or controller.stopped:
            return
        late = self.now_s - controller.ticked_s > LATE_S
        controller.ticked_s = self.now_s
        before = controller.term
        if not late:
            words = [word for word, at_s in controller.words.values() if self.now_s - at_s <= SILENT_S]
            controller.term = decide(before, words, self.now_s)
        leads = controller.term.leads
        if leads is None:
            return
        begins = leads != before.leads
        if begins:
            assert leads not in self.led, "no two ever lead as the same"
            assert before.newest is None or leads > before.newest
            self.led.add(leads)
        beats = not late and (begins or self.now_s - controller.beat_s >= BEAT_S)
        for p in range(len(self.peers)):
            down = self.cables[c, p].down
            if down is not None:
                if beats:
                    down.say(Leads(leads), self._due(late_s))
                down.say(Action(leads), self._due(late_s))  # also by one that has just stood still
        if beats:
            controller.beat_s = self.now_s

    # --- what is so ---

    def leaders(self) -> list[int]:
        return [c for c, one in enumerate(self.controllers) if one is not None and one.term.leads is not None]

    def obeyed(self) -> list[Generation | None]:
        """What each follower did last."""
        return [peer.done[-1] if peer.done else None for peer in self.peers]

    def check_order(self) -> None:
        for peer in self.peers:
            assert peer.done == sorted(peer.done), "never an older one after a newer one"

    def until_one_leads(self, within_s: float) -> float:
        """Until all do what one controller says, which is the only one that leads; returns after how many seconds."""
        began_s = self.now_s
        while True:
            leaders = self.leaders()
            if len(leaders) == 1:
                one = self.controllers[leaders[0]]
                assert one is not None
                if self.obeyed() == [one.term.leads] * len(self.peers):
                    return self.now_s - began_s
            assert self.now_s - began_s < within_s, (leaders, self.obeyed())
            self.step()


@pytest.mark.parametrize("controllers", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_leads_at_once_and_nothing_changes_while_all_is_well(seed: int, controllers: int) -> None:
    world = World(seed, controllers)
    assert world.until_one_leads(CONFIRM_S + 6 * TICK_S + 2 * DELAY_S)
    assert world.leaders() == [0]
    world.run(20)
    assert (world.leaders(), len(world.led), [peer.refused for peer in world.peers]) == ([0], 1, [0] * 3)


def test_connections_that_all_end_and_are_made_again_at_once_and_many_that_are_new_change_nothing() -> None:
    world = World(1, peers=4)
    world.until_one_leads(1)
    for _ in range(10):
        for p in range(4):
            world.end(0, p)
        world.run(1)
    for new in range(1, 100):
        words = [Follows(Generation(1, "a"), heard=True), *[Follows(None, heard=False)] * new]
        standby = Term(1, "b", stood_by=True)
        for tick in range(100):
            standby = decide(standby, words, tick * TICK_S)
        assert standby.leads is None
    assert (world.leaders(), len(world.led)) == ([0], 1)
    standby = Term(1, "b", stood_by=True)
    for tick in range(100):
        standby = decide(standby, [Follows(Generation(1, "a"), heard=tick % 4 == 0)], tick * TICK_S)
    assert standby.leads is None, "it is heard again and again"


def test_who_has_not_listened_does_not_say_that_it_has_heard_nothing() -> None:
    follower = Follower()
    follower.met(0, Generation(1, "a"), 100.0)
    assert follower.word(100.0 + SILENT_S).heard
    assert not follower.word(100.1 + SILENT_S).heard
    follower.stood_still(110.0)
    assert follower.word(110.0 + SILENT_S).heard
    assert not follower.word(110.1 + SILENT_S).heard


@pytest.mark.parametrize("seed", range(12))
def test_whoever_leads_has_a_successor_at_once_when_it_is_killed_and_within_two_seconds_when_it_stops(
    seed: int,
) -> None:
    world = World(seed, peers=random.Random(seed).choice([1, 2, 3, 10]))
    world.until_one_leads(1)
    for kills in range(6):
        (first,) = world.leaders()
        world.run(world.rng.uniform(0.1, 5))
        if kills % 2:
            world.kill(first)
            assert world.until_one_leads(TAKE_OVER_S) <= CONFIRM_S + 6 * TICK_S + 2 * DELAY_S
            world.run(world.rng.uniform(0.0, 3))
            world.start(first)
        else:
            old = world.controllers[first]
            assert old is not None
            old.stopped = True
            began_s = world.now_s
            while len(world.leaders()) < 2:
                world.step()
                assert world.now_s - began_s <= TAKE_OVER_S
            world.run(world.rng.uniform(0.2, 20))
            old.stopped = False
            assert world.until_one_leads(1.0)
            assert sum(peer.refused for peer in world.peers) > 0, "it woke and did not know yet"
        world.check_order()
        assert world.leaders() == [1 - first], "what comes back stands by"
    assert len(world.led) == 7, "and none led in between"


@pytest.mark.parametrize("seed", range(8))
def test_when_both_are_killed_whichever_is_back_leads_and_the_other_stands_by(seed: int) -> None:
    world = World(seed)
    world.until_one_leads(1)
    for back in ([0], [1], [0, 1], [1, 0]):
        world.run(1)
        for place in (0, 1):
            world.kill(place)
        world.run(world.rng.uniform(0, 5))
        for place in back:
            world.start(place)
        assert world.until_one_leads(TAKE_OVER_S) <= FIRST_WAIT_S + CONFIRM_S + 6 * TICK_S + 2 * DELAY_S
        if len(back) == 2:
            assert world.leaders() == [0]
        for place in {0, 1} - {*back}:
            world.start(place)
        led = len(world.led)
        world.run(15)
        assert len(world.led) == led
        world.check_order()


@pytest.mark.parametrize("reached", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_one_that_is_cut_off_from_most_that_it_is_for_has_a_successor_and_one_cut_off_from_fewer_has_none(
    seed: int, reached: int
) -> None:
    world = World(seed, peers=5)
    world.until_one_leads(1)
    (first,) = world.leaders()
    for p in world.rng.sample(range(5), 2):
        world.cables[first, p].cut = True
    world.run(15)
    assert world.leaders() == [first]
    for p in range(5):
        world.cables[first, p].cut = p >= reached
    world.run(TAKE_OVER_S)
    assert world.leaders() == ([1 - first] if reached else [0, 1]), "it learns that from whoever it reaches"
    assert world.obeyed() == [world.controllers[1 - first].term.leads] * 5  # type: ignore[union-attr]
    for p in range(5):
        world.cables[first, p].cut = False
    world.until_one_leads(1.0)
    assert world.leaders() == [1 - first]
    world.run(15)
    assert len(world.led) == 2
    world.check_order()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_nobody_does_what_an_older_one_says_and_afterwards_one_leads_and_goes_on(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed, controllers=rng.choice([1, 2, 2, 2, 3]), peers=rng.choice([1, 2, 3, 5]))
    for _ in range(60):
        place, p = rng.randrange(len(world.controllers)), rng.randrange(len(world.peers))
        controller, cable = world.controllers[place], world.cables[place, p]
        match rng.randrange(10):
            case 0:
                world.kill(place)
            case 1 | 2 if controller is None:
                world.start(place)
            case 3 if controller is not None:
                controller.stopped = not controller.stopped
            case 4:
                world.peers[p].stopped = not world.peers[p].stopped
            case 5 | 6:
                cable.cut = not cable.cut
            case 7:
                world.end(place, p)
            case 8:
                world.renew(p)
            case _:
                pass
        world.run(rng.choice([0.05, 0.1, 0.5, 2.0]), late_s=rng.choice([0.0, DELAY_S, 1.0]))
        world.check_order()
    for cable in world.cables.values():
        cable.cut = False
    for peer in world.peers:
        peer.stopped = False
    for place, controller in enumerate(world.controllers):
        if controller is not None:
            controller.stopped = False
        elif not any(world.controllers) or rng.random() < 0.5:
            world.start(place)
    world.run(2.0, late_s=DELAY_S)  # what was late arrives
    world.until_one_leads(SILENT_S + CONFIRM_S + 2 * FIRST_WAIT_S + 0.5)
    led = len(world.led)
    world.run(20)
    assert (len(world.leaders()), len(world.led)) == (1, led)
    world.check_order()
