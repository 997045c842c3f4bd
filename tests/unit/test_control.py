"""The common verdict of all ranks on a rollout."""

import pytest

from rollcast.producer.control import Member, Vote, decide, vote_for
from rollcast.producer.errors import RolloutDataError, SpoolError, SpoolFullError
from rollcast.producer.result import DropReason, drop_reason_of

_MEMBERS = [Member(4, 0, 0), Member(5, 0, 1), Member(6, 1, 0), Member(7, 1, 1)]
_GO = [(Vote.READY, 11, 3), (Vote.READY, 11, 3), (Vote.READY, 22, 3), (Vote.READY, 22, 3)]


def test_equal_plans_within_each_shard_are_a_go() -> None:
    assert decide(_MEMBERS, _GO) is None


@pytest.mark.parametrize(
    ("vote", "kind"),
    [
        (Vote.BAD_DATA, DropReason.BAD_DATA),
        (Vote.SPOOL_FULL, DropReason.SPOOL_FULL),
        (Vote.FAILED, DropReason.NOT_CREATED),
        (Vote.UNEXPECTED, DropReason.UNEXPECTED),
    ],
)
def test_one_objection_drops_the_rollout_and_names_the_rank(vote: Vote, kind: DropReason) -> None:
    refusal = decide(_MEMBERS, [*_GO[:2], (vote, 0, 3), _GO[3]])
    assert refusal is not None
    assert refusal.kind is kind
    assert "rank 6 (shard 1)" in refusal.reason
    assert refusal.announced


def test_the_rank_that_refuses_names_itself_once_and_another_with_a_reason_of_its_own_is_named_too() -> None:
    refusal = decide(_MEMBERS, [*_GO[:2], (Vote.SPOOL_FULL, 0, 3), _GO[3]])
    assert refusal is not None
    error = SpoolFullError("no room")
    assert refusal.told_on(6, error) == "rank 6 (shard 1): spool full: no room"
    assert refusal.told_on(7, error) == "rank 6 (shard 1): spool full; here, on rank 7: no room"
    assert refusal.told_on(7, None) == "rank 6 (shard 1): spool full"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SpoolFullError("no room"), DropReason.SPOOL_FULL),
        (RolloutDataError("misaligned"), DropReason.BAD_DATA),
        (TypeError("no tensor"), DropReason.BAD_DATA),
        (SpoolError("no folder"), DropReason.NOT_CREATED),
        (PermissionError("not mine"), DropReason.NOT_CREATED),
        (MemoryError("no memory"), DropReason.UNEXPECTED),
        (AttributeError("a mistake of ours"), DropReason.UNEXPECTED),
    ],
    ids=repr,
)
def test_each_failure_has_its_own_word_and_its_vote_gives_all_ranks_the_same(
    error: Exception, kind: DropReason
) -> None:
    assert drop_reason_of(error) is kind
    refusal = decide(_MEMBERS, [*_GO[:2], (vote_for(kind), 0, 3), _GO[3]])
    assert refusal is not None
    assert refusal.kind is kind


def test_peers_that_hold_different_fields_drop_the_rollout() -> None:
    refusal = decide(_MEMBERS, [*_GO[:3], (Vote.READY, 23, 3)])
    assert refusal is not None
    assert "shard 1 hold different fields" in refusal.reason
    assert refusal.announced


def test_a_repeated_rollout_is_refused_without_an_announcement_that_would_contradict_the_first() -> None:
    refusal = decide(_MEMBERS, [(Vote.REPEATED, 0, 3)] * 4)
    assert refusal is not None
    assert not refusal.announced


def test_ranks_that_publish_different_rollouts_refuse_all_of_them() -> None:
    refusal = decide(_MEMBERS, [*_GO[:3], (Vote.READY, 22, 4)])
    assert refusal is not None
    assert "rank 7: 4" in refusal.reason
    assert not refusal.announced
