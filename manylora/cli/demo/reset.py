"""Removes what the demo traffic left: its usage, and the keys it was sent with. Needs no server, and allows none."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import chain
from pathlib import Path

from manylora import demo
from manylora.cli.demo.round import TENANTS
from manylora.cli.demo.traffic import KEY_NAME
from manylora.config import Config, environment
from manylora.errors import ConfigError, NotFoundError
from manylora.registry.db.database import database_url
from manylora.registry.registry import Registry
from manylora.server.auth.admin_key import given_pepper
from manylora.server.settings import load_config


def reset_demo(data_dir: Path) -> tuple[int, int]:
    """Remove the demo traffic's usage from the ledger, and revoke its keys; all else stays as it is.

    Args:
        data_dir: The demo's folder.

    Returns:
        The number of usage events that are gone, and of keys that were revoked.

    Raises:
        ConfigError: There is no demo, or a server uses the folder.
        CapacityError: Database or journal cannot be written now.
    """
    config = load_config(
        {"model": {"path": str(demo.MODEL)}, "server": {"data_dir": data_dir}}, environment()
    )
    url = database_url(config.registry.database_url, data_dir)
    has_database = url.get_backend_name() != "sqlite" or Path(str(url.database)).is_file()
    if not (data_dir.is_dir() and has_database):  # opening the registry would make both
        raise _no_demo(data_dir)
    return asyncio.run(_reset(config, data_dir))


async def _reset(config: Config, data_dir: Path) -> tuple[int, int]:
    registry = await Registry.open(
        config.registry.database_url, data_dir, pepper=given_pepper(environment())
    )
    try:
        owned = []
        for tenant in TENANTS:
            with suppress(NotFoundError):
                owned.append(await registry.keys.list_keys(tenant, with_revoked=True))
        if not owned:
            raise _no_demo(data_dir)
        keys = [key for key in chain(*owned) if key.name == KEY_NAME]
        living = [key for key in keys if key.revoked_at is None]
        for key in living:
            await registry.keys.revoke_key(key.id)
        return await registry.usage.erase([key.id for key in keys]) if keys else 0, len(living)
    finally:
        await registry.close()


def _no_demo(data_dir: Path) -> ConfigError:
    return ConfigError(
        f"There is no demo in {data_dir}. Name its folder with --data-dir.", param="data_dir"
    )
