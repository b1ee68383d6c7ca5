"""Tables of `runs`, one file per idea."""

from runs.models.accounts import AccountEvent, Invitation
from runs.models.curves import CurveBlock
from runs.models.directives import Directive, DirectiveAck
from runs.models.findings import DetectorState, Finding, FirstBad
from runs.models.grid import Grid, GridBlock, GridWaiting
from runs.models.hooks import FleetReport, HookToken
from runs.models.keys import ServerKey
from runs.models.nodes import NodeEvent, NodeReading, NodeStay
from runs.models.people import Membership, Person, Project, Role, Scope, Token
from runs.models.policies import PolicyVersion
from runs.models.runs import Attempt, Checkpoint, Run, RunProgress, RunSecret
from runs.models.telemetry import Event, Frame, Pending, Receipt, UnreadBody
from runs.models.work import Work

__all__ = [
    "AccountEvent",
    "Attempt",
    "Checkpoint",
    "CurveBlock",
    "DetectorState",
    "Directive",
    "DirectiveAck",
    "Event",
    "Finding",
    "FirstBad",
    "FleetReport",
    "Frame",
    "Grid",
    "GridBlock",
    "GridWaiting",
    "HookToken",
    "Invitation",
    "Membership",
    "NodeEvent",
    "NodeReading",
    "NodeStay",
    "Pending",
    "Person",
    "PolicyVersion",
    "Project",
    "Receipt",
    "Role",
    "Run",
    "RunProgress",
    "RunSecret",
    "Scope",
    "ServerKey",
    "Token",
    "UnreadBody",
    "Work",
]
