"""A request's way through the gateway, against a fake engine."""

from tests.fakes.engine import engines
from tests.gateway.data.harness import BASE_DIGEST, Place, Seeded, digest_of, gateway
from tests.gateway.postgres import Database


async def test_an_adapter_is_served_with_the_trusted_reference(
    database: Database, place: Place, seeded: Seeded
) -> None:
    engine = place.engine()
    async with engines(engine):
        engine.publish(place.endpoints)
        async with gateway(place.settings(database.data_url), replicas=1) as gw:
            answer = await gw.ask(seeded.acme, "pirate", headers={"x-request-id": "mine-1"})
            assert answer.status_code == 200
            assert answer.json()["model"] == "pirate"
            sent = (await engine.request()).headers
            assert sent["x-loraplane-adapter"] == "acme/pirate@1"
            assert sent["x-loraplane-digest"] == digest_of("pirate")
            assert sent["x-loraplane-bytes"] == "4096"
            assert sent["x-loraplane-rank"] == "8"
            assert sent["x-loraplane-base-digest"] == BASE_DIGEST
            assert sent["x-request-id"] == answer.headers["x-request-id"] == "mine-1"
            assert answer.headers["x-loraplane-replica"] == "models/one/0"
            assert "x-loraplane-internal" not in answer.headers
            await gw.until_idle()
