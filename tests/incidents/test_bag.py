"""What incidents add to an evidence bag."""

import json

import pytest

from evidence.custody import verify_custody
from evidence.proof.exporting import export_bag
from incidents import approval, ledger
from runs.erasing import erase

pytestmark = pytest.mark.django_db


def test_it_holds_the_incident_the_ledger_and_the_permit(world, team, tmp_path):
    incident = world.incident()
    digest = approval.subject(incident)[1]
    approval.request_resume(incident=incident, person=team.mira, digest=digest)
    approval.approve(incident=incident, person=team.jonas, digest=digest)
    export_bag(incident.dossier, tmp_path / "bag")
    data = tmp_path / "bag" / "data"
    told = json.loads((data / "incident.json").read_text())
    assert told["first_bad"]["step"] == 1000
    assert told["requests"][0]["approvals"][0]["by"] == str(team.jonas.opaque_id)
    rows = json.loads((data / "ledger.json").read_text())["rows"]
    assert [row["digest"] for row in rows] == [row.digest for row in world.run.ledger.order_by("seq")]
    assert json.loads((data / "permits" / f"{world.permit().public_id}.json").read_text())["attempt"] == 2
    # People can be erased; what is exported names them by an id that says nothing.
    everything = "".join(path.read_text() for path in data.rglob("*.json"))
    assert "jonas" not in everything
    for person in (team.mira, team.jonas):
        erase(person)
    assert ledger.verify(world.run) == []
    assert verify_custody(incident.dossier) == []
