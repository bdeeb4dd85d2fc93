"""Hand-offs that brought nothing, as a counter gives them away."""

from pointsman.domain.proof import Proof


def read(proof: Proof, *readings: tuple[float, int]) -> int:
    for now, counter in readings:
        proof.read(counter, now)
    return proof.recomputed


def test_p19_a_counter_that_stands_still_from_before_to_two_readings_after_is_proof() -> None:
    proof = Proof()
    read(proof, (1.0, 700))
    proof.handed_over(1.5)
    proof.handed_over(1.5)
    assert read(proof, (3.0, 700), (5.0, 700)) == 0
    assert read(proof, (7.0, 700)) == 2
    assert read(proof, (9.0, 700), (11.0, 700), (13.0, 700)) == 2


def test_p19_a_hand_off_that_arrived_is_seen_in_any_of_the_readings() -> None:
    for late in range(3):
        proof = Proof()
        read(proof, (1.0, 0))
        proof.handed_over(1.5)
        readings = [(3.0 + n, 0 if n < late else 128) for n in range(8)]
        assert read(proof, *readings) == 0


def test_p19_a_long_answer_moved_the_counter_long_before_it_was_over() -> None:
    proof = Proof()
    read(proof, (1.0, 0), (3.0, 128), (5.0, 128))
    proof.handed_over(2.0)
    assert read(proof, (7.0, 128), (9.0, 128), (11.0, 128)) == 0
    proof.handed_over(3.0)
    assert read(proof, (13.0, 128), (15.0, 128), (17.0, 128)) == 1


def test_each_hand_off_waits_for_readings_of_its_own() -> None:
    proof = Proof()
    read(proof, (1.0, 5))
    found = []
    for now in (2.0, 3.0, 4.0, 5.0, 6.0, 7.0):
        if now < 5.0:
            proof.handed_over(now - 0.5)
        found.append(read(proof, (now, 5)))
    assert found == [0, 0, 1, 2, 3, 3]


def test_nothing_is_proved_without_a_reading_from_before() -> None:
    proof = Proof()
    proof.handed_over(0.5)
    read(proof, (1.0, 5))
    proof.handed_over(0.5)
    assert read(proof, (3.0, 5), (5.0, 5), (7.0, 5), (9.0, 5)) == 0


def test_an_engine_that_does_not_say_proves_nothing_and_hides_nothing() -> None:
    proof = Proof()
    read(proof, (1.0, 5))
    proof.handed_over(1.5)
    assert read(proof, (3.0, 5), (5.0, -1), (7.0, -1), (9.0, 5)) == 0
    assert read(proof, (11.0, 5)) == 1


def test_an_engine_that_began_anew_begins_anew() -> None:
    proof = Proof()
    read(proof, (1.0, 500))
    proof.handed_over(1.5)
    assert read(proof, (3.0, 0), (5.0, 0), (7.0, 0), (9.0, 0)) == 0
