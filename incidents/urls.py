"""Pages of incidents."""

from django.urls import path

from incidents import (
    decisions,
    diagnosis_views,
    first_hour_views,
    goodput_views,
    grid_views,
    ledger_views,
    lineage,
    node_views,
    note_views,
    raw_views,
    system,
    views,
)
from incidents.paging import views as paging_views
from incidents.postmortem import views as postmortem
from incidents.postmortem.render import TYPES
from incidents.rulebook import views as rulebook
from incidents.standing_approvals import views as standing

urlpatterns = [
    path("incidents", views.incidents, name="incidents"),
    path("incidents/<int:incident_id>", views.incident, name="incident"),
    path("incidents/<int:incident_id>/parts/<slug:name>", views.incident_fragment, name="incident_part"),
    path("incidents/<int:incident_id>/grid.png", grid_views.incident_grid, name="incident_grid"),
    path("incidents/<int:incident_id>/layers.png", grid_views.incident_layers, name="incident_layers"),
    path("incidents/<int:incident_id>/figure.json", grid_views.incident_figure, name="incident_figure"),
    path("incidents/<int:incident_id>/cells.json", grid_views.incident_cells, name="incident_cells"),
    path("incidents/<int:incident_id>/cell.json", grid_views.incident_cell, name="incident_cell"),
    path("incidents/<int:incident_id>/acknowledge", decisions.acknowledge, name="acknowledge"),
    path("incidents/<int:incident_id>/plan", decisions.change_plan, name="change_plan"),
    path("incidents/<int:incident_id>/request", decisions.request_resume, name="request_resume"),
    path("incidents/<int:incident_id>/false-alarm", decisions.false_alarm, name="false_alarm"),
    path("incidents/<int:incident_id>/waive", decisions.waive, name="waive"),
    path("incidents/<int:incident_id>/notes", note_views.note, name="note"),
    path("incidents/<int:incident_id>/notes/preview", note_views.preview, name="note_preview"),
    path("incidents/<int:incident_id>/images", note_views.image, name="note_image"),
    path("incidents/<int:incident_id>/images/<str:sha256>", note_views.shown_image, name="shown_image"),
    path("incidents/<int:incident_id>/resolve", decisions.resolve, name="resolve"),
    path("incidents/<int:incident_id>/diagnosis/take", diagnosis_views.take, name="take_family"),
    path("incidents/<int:incident_id>/diagnosis/release", diagnosis_views.release, name="release_family"),
    path("incidents/<int:incident_id>/diagnosis/start", diagnosis_views.start, name="start_probe"),
    path("incidents/<int:incident_id>/diagnosis/stop", diagnosis_views.stop, name="stop_probe"),
    path("incidents/<int:incident_id>/diagnosis/result", diagnosis_views.result, name="probe_result"),
    path("incidents/<int:incident_id>/diagnosis/cause", diagnosis_views.cause, name="close_cause"),
    path("incidents/<int:incident_id>/postmortem", postmortem.postmortem, name="postmortem"),
    path("incidents/<int:incident_id>/postmortem/edit", postmortem.edit, name="postmortem_edit"),
    path("incidents/<int:incident_id>/postmortem/final", postmortem.finalise, name="postmortem_final"),
    path("incidents/<int:incident_id>/postmortem/reopen", postmortem.reopen, name="postmortem_reopen"),
    path("incidents/<int:incident_id>/postmortem/review", postmortem.review, name="postmortem_review"),
    *(
        path(f"incidents/<int:incident_id>/postmortem.{form}", postmortem.download, {"form": form})
        for form in TYPES
    ),
    path("incidents/<int:incident_id>/approve", decisions.approve, name="approve"),
    path("incidents/<int:incident_id>/reject", decisions.reject, name="reject"),
    path("incidents/<int:incident_id>/withdraw", decisions.withdraw, name="withdraw"),
    path("incidents/<int:incident_id>/break-glass", decisions.break_glass, name="break_glass"),
    path("incidents/<int:incident_id>/solo", decisions.solo, name="solo"),
    path("incidents/<int:incident_id>/raw/<slug:name>", raw_views.read, name="raw"),
    path("incidents/<int:incident_id>/duties", first_hour_views.give_duty, name="give_duty"),
    path("incidents/<int:incident_id>/status", first_hour_views.status, name="status"),
    path("incidents/<int:incident_id>/status.txt", first_hour_views.status_txt, name="status_txt"),
    path("incidents/<int:incident_id>/hand-over", first_hour_views.hand_over, name="hand_over"),
    path("acknowledge/<str:token>", first_hour_views.acknowledge_by_link, name="acknowledge_by_link"),
    path("runs/<slug:slug>/hold", decisions.hold, name="hold"),
    path("runs/<slug:slug>/lineage", lineage.page, name="lineage"),
    path("runs/<slug:slug>/ledger", ledger_views.run_ledger, name="run_ledger"),
    path("runs/<slug:slug>/seen", ledger_views.run_seen, name="run_seen"),
    *(
        path(f"runs/<slug:slug>/ledger.{form}", ledger_views.export, {"form": form})
        for form in ledger_views.CONTENT_TYPES
    ),
    path("runs/<slug:slug>/goodput", goodput_views.run_goodput, name="run_goodput"),
    path("goodput", goodput_views.goodput_page, name="goodput"),
    path("ledger", ledger_views.all_ledgers, name="ledger"),
    path("on-call", paging_views.show, name="on_call"),
    path("on-call/take", paging_views.take, name="take_pager"),
    path("on-call/pages/<int:page_id>/acknowledge", paging_views.acknowledge, name="acknowledge_page"),
    path("incidents/<int:incident_id>/page", paging_views.page_someone, name="page_someone"),
    path("nodes", node_views.nodes, name="nodes"),
    path("fragments/nodes", node_views.nodes_table, name="nodes_table"),
    path("nodes/<path:node>", node_views.node, name="node"),
    path("rules", rulebook.show, name="rules"),
    path("rules/<slug:rule>", rulebook.one, name="rule"),
    path("rules/<slug:rule>/<slug:slug>", rulebook.on_run, name="rule_on_run"),
    path("rules/<slug:rule>/<slug:slug>/mode", rulebook.set_mode, name="set_mode"),
    path("rules/<slug:rule>/<slug:slug>/judge", rulebook.judge, name="judge"),
    path("standing", standing.show, name="standing"),
    path("standing/new", standing.create, name="standing_new"),
    path("standing/<int:standing_id>", standing.one, name="standing_one"),
    path("standing/<int:standing_id>/sign", standing.sign, name="standing_sign"),
    path("standing/<int:standing_id>/revoke", standing.revoke, name="standing_revoke"),
    path("search", system.search, name="search"),
    path("system", system.system, name="system"),
    path("system/probe.json", system.probe_json, name="probe_json"),
    path("system/parts", system.system_parts, name="system_parts"),
]
