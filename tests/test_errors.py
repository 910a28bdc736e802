"""The gateway's own errors: status, outcome and `Retry-After` of each code."""

from __future__ import annotations

import pytest

from gateway.errors import Code, EngineError, GatewayError

TABLE = {
    "invalid_json": (400, "rejected"),
    "invalid_request": (400, "rejected"),
    "invalid_api_key": (401, "rejected"),
    "model_not_allowed": (403, "rejected"),
    "model_not_found": (404, "rejected"),
    "not_found": (404, "rejected"),
    "body_timeout": (408, "rejected"),
    "body_too_large": (413, "rejected"),
    "rate_limited": (429, "shed"),
    "queue_full": (429, "shed"),
    "not_supported": (501, "rejected"),
    "engine_failed": (502, "engine_failed"),
    "no_engine": (503, "shed"),
    "queue_timeout": (503, "shed"),
    "draining": (503, "drained"),
    "cancelled": (503, "cancelled"),
    "engine_timeout": (504, "engine_timeout"),
}


def test_the_table_is_closed() -> None:
    assert {*Code} == {*TABLE}


@pytest.mark.parametrize("code", Code)
def test_each_code_has_its_status_and_outcome(code: Code) -> None:
    error = GatewayError(code, "what was wrong")
    assert (error.status, error.outcome) == TABLE[code]
    assert (error.retry_after is not None) == (error.status in (429, 503))
    assert error.retry_after is None or error.retry_after >= 1


def test_an_error_carries_its_message_and_the_field_to_blame() -> None:
    error = GatewayError(Code.INVALID_REQUEST, "The field 'n' must be a whole number.", param="n")
    assert (str(error), error.message, error.param) == (error.message, str(error), "n")
    assert GatewayError(Code.NOT_FOUND, "gone").param is None


def test_what_is_for_the_record_alone_is_no_part_of_the_message() -> None:
    error = GatewayError(Code.ENGINE_FAILED, "It failed.", detail="10.0.0.7 refused")
    assert (error.detail, str(error)) == ("10.0.0.7 refused", "It failed.")
    assert EngineError(Code.ENGINE_FAILED, "It failed.", detail="why").detail == "why"
    assert EngineError(Code.ENGINE_FAILED, "It failed.").detail is None


def test_only_an_engines_error_can_be_stale_and_only_when_it_says_so() -> None:
    assert not EngineError(Code.ENGINE_FAILED, "refused").stale
    assert EngineError(Code.ENGINE_FAILED, "closed already", stale=True).stale
    assert isinstance(EngineError(Code.ENGINE_TIMEOUT, "slow"), GatewayError)
