"""Adapters, versions and aliases of two tenants against dictionaries that say what ought to be there."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from manylora.errors import InvalidRequestError, ManyloraError, NotFoundError
from manylora.registry.registry import Registry
from postgres_server import database_of
from registry_samples import facts, publish_version

pytestmark = pytest.mark.no_cover

TENANTS = st.sampled_from(["acme", "other"])
NAMES = st.sampled_from(["a", "b"])
CONTENTS = st.sampled_from("xyz")
VERSIONS = st.integers(1, 5)
ALIASES = st.sampled_from(["default", "prod"])


@dataclass
class Expected:
    """One adapter as it ought to be."""

    next_version: int = 1
    versions: dict[int, str] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)


class AdapterMachine(RuleBasedStateMachine):
    kind = "sqlite"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.registry = self.runner.run(Registry.open(database_of(self.kind), self.folder))
        self.ids: dict[str, str] = {}
        self.expected: dict[tuple[str, str], Expected] = {}

    @initialize()
    def make_tenants(self) -> None:
        for name in ("acme", "other"):
            self.ids[name] = self.runner.run(self.registry.tenants.create_tenant(name)).id

    @rule(tenant=TENANTS, name=NAMES, content=CONTENTS, activate=st.booleans())
    def publish(self, tenant: str, name: str, content: str, activate: bool) -> None:
        _, version, created = self.runner.run(
            publish_version(
                self.registry, self.ids[tenant], name, facts(content), activate=activate
            )
        )
        adapter = self.expected.setdefault((tenant, name), Expected())
        same = [number for number, known in adapter.versions.items() if known == content]
        assert created == (not same)
        if created:
            adapter.versions[adapter.next_version] = content
            same = [adapter.next_version]
            adapter.next_version += 1
        assert version.version == same[0]
        if activate:
            adapter.aliases["default"] = same[0]

    @rule(tenant=TENANTS, name=NAMES, alias=ALIASES, version=st.none() | VERSIONS)
    def point(self, tenant: str, name: str, alias: str, version: int | None) -> None:
        adapter = self.expected.get((tenant, name))
        change = self.registry.adapters.update_adapter(
            self.ids[tenant], name, aliases={alias: version}
        )
        if adapter is None:
            self._fails(change, NotFoundError)
        elif version is None:
            self.runner.run(change)
            adapter.aliases.pop(alias, None)
        elif version in adapter.versions:
            self.runner.run(change)
            adapter.aliases[alias] = version
        else:
            self._fails(change, InvalidRequestError)

    @rule(tenant=TENANTS, name=NAMES, version=st.none() | VERSIONS)
    def delete(self, tenant: str, name: str, version: int | None) -> None:
        adapter = self.expected.get((tenant, name))
        change = self.registry.adapters.delete_adapter(self.ids[tenant], name, version)
        if adapter is None or (version is not None and version not in adapter.versions):
            self._fails(change, NotFoundError)
            return
        before = self._contents()
        removed = self.runner.run(change)
        if version is None or len(adapter.versions) == 1:
            del self.expected[tenant, name]
        else:
            del adapter.versions[version]
            adapter.aliases = {
                alias: number for alias, number in adapter.aliases.items() if number != version
            }
        gone = before - self._contents()
        assert set(removed.digests) == {facts(content).digest for content in gone}
        assert set(removed.weights) == {facts(content).weights_sha256 for content in gone}

    @rule(
        tenant=TENANTS,
        name=NAMES,
        pin=st.sampled_from(
            [
                "",
                "@1",
                "@2",
                "@3",
                "@prod",
                "@default",
                *(f"@{facts(each).digest}" for each in "xy"),
            ]
        ),
        qualified=st.booleans(),
    )
    def resolve(self, tenant: str, name: str, pin: str, qualified: bool) -> None:
        adapter = self.expected.get((tenant, name), Expected())
        by_digest = {
            f"@{facts(content).digest}": number for number, content in adapter.versions.items()
        }
        wanted = by_digest.get(pin, adapter.aliases.get(pin[1:] or "default", 0))
        wanted = int(pin[1:]) if pin[1:].isdigit() else wanted
        text = f"{tenant}/{name}{pin}" if qualified else f"{name}{pin}"
        question = self.registry.adapters.resolve(self.ids[tenant], text)
        if wanted in adapter.versions:
            found, version = self.runner.run(question)
            assert (found.tenant_id, version.version) == (self.ids[tenant], wanted)
            assert version.digest == facts(adapter.versions[wanted]).digest
        else:
            assert self._fails(question, NotFoundError).code == "model_not_found"

    @rule(caller=TENANTS, name=NAMES, pin=st.sampled_from(["", "@1", f"@{facts('x').digest}"]))
    def reach_for_another_tenants_adapter(self, caller: str, name: str, pin: str) -> None:
        owner = "other" if caller == "acme" else "acme"
        self._fails(
            self.registry.adapters.resolve(self.ids[caller], f"{owner}/{name}{pin}"), NotFoundError
        )

    @invariant()
    def everything_is_as_expected(self) -> None:
        for tenant, tenant_id in self.ids.items():
            listed = self.runner.run(self.registry.adapters.list_adapters(tenant_id)).items
            assert [adapter.name for adapter in listed] == sorted(
                name for owner, name in self.expected if owner == tenant
            )
            for adapter in listed:
                expected = self.expected[tenant, adapter.name]
                assert adapter.tenant_id == tenant_id
                assert adapter.aliases == {
                    alias: {number: 1} for alias, number in expected.aliases.items()
                }
                assert adapter.current.version == expected.aliases.get(
                    "default", max(expected.versions)
                )
                versions = self.runner.run(
                    self.registry.adapters.list_versions(tenant_id, adapter.name)
                )
                assert [(version.version, version.digest) for version in versions] == [
                    (number, facts(content).digest)
                    for number, content in sorted(expected.versions.items(), reverse=True)
                ]

    def teardown(self) -> None:
        self.runner.run(self.registry.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    def _contents(self) -> set[str]:
        return {
            content for adapter in self.expected.values() for content in adapter.versions.values()
        }

    def _fails(self, change: Any, error: type[ManyloraError]) -> ManyloraError:
        with pytest.raises(error) as caught:
            self.runner.run(change)
        return caught.value


class PostgresMachine(AdapterMachine):
    kind = "postgresql"


for machine in (AdapterMachine, PostgresMachine):
    machine.TestCase.settings = settings(max_examples=8, stateful_step_count=20)
TestAdapters = AdapterMachine.TestCase
TestAdaptersInPostgres = PostgresMachine.TestCase
