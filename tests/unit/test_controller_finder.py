"""A controller that cannot be found is waited for, whatever Serve says of it: who looks for two goes on with the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.process import controller_finder


@pytest.mark.parametrize("error", [RayActorError(), DeploymentUnavailableError(DeploymentID("Standby", "forebay"))])
async def test_whatever_serve_answers_for_one_that_is_not_there_says_that_nobody_knows_just_now(
    error: Exception,
) -> None:
    async def remote() -> tuple[str, int]:
        raise error

    handle = cast("DeploymentHandle[Any]", SimpleNamespace(address=SimpleNamespace(remote=remote)))
    with pytest.raises(TimeoutError, match="Serve knows no controller now"):
        await controller_finder(handle)()
