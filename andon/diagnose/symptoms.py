"""Symptom classes: what a failure looks like, and the first answer the field gives to it."""

import msgspec


class Symptom(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the playbook, in words a person on call can act on.

    Attributes:
        name: what is seen, in a few words.
        look_first: where the cause most often was.
        protect: what to keep or stop before anything else.
        confirm: what tells the explanations apart.
        recover: what ended it elsewhere.
    """

    name: str
    look_first: str
    protect: str
    confirm: str
    recover: str


SYMPTOMS: dict[str, Symptom] = {
    "instant_nonfinite": Symptom(
        name="NaN or Inf in one step, then everywhere",
        look_first="numerics: overflow, a bad sample, optimizer state",
        protect="stop and preserve state",
        confirm="the first nonfinite tensor; the gradient norm before it",
        recover="fix the cause, resume from the nearest good checkpoint",
    ),
    "one_rank_nonfinite": Symptom(
        name="NaN or Inf on one rank first",
        look_first="that rank's shard, that rank's device",
        protect="hold, keep its batch",
        confirm="swap shard and device one at a time; sample seeds; duplicate ids",
        recover="drop the shard or the node",
    ),
    "skipped_nonfinite": Symptom(
        name="nonfinite gradients, updates skipped",
        look_first="numerics: overflow, an overlong or odd sample",
        protect="keep the batches of the skipped steps",
        confirm="whether it recurs on other data; the scale over time",
        recover="none for one; drop the batch if it recurs",
    ),
    "scaler_not_restored": Symptom(
        name="loss scale searched again after a restart",
        look_first="optimizer state: the scaler was not saved or not loaded",
        protect="keep both checkpoints",
        confirm="scale before and after the restart",
        recover="restore the scaler state",
    ),
    "spike_recovers": Symptom(
        name="loss spike that recovers",
        look_first="data: an odd batch; a transient on the network",
        protect="record, watch 50 more steps",
        confirm="recurrence; network counters",
        recover="none unless it recurs; then data",
    ),
    "spike_stays": Symptom(
        name="loss spike without recovery",
        look_first="learning rate, distribution shift, a corrupt resume",
        protect="keep the checkpoint ladder; try lr × 0.3 on a copy",
        confirm="whether the lower rate improves it",
        recover="if it does: the rate; if not: data or checkpoint",
    ),
    "repeated_spikes": Symptom(
        name="spikes at other steps again",
        look_first="learning rate too high, optimizer state",
        protect="pin the checkpoint ladder",
        confirm="lr × 0.3 on a copy; attention logits",
        recover="lower the rate or lengthen the warm-up",
    ),
    "level_shift": Symptom(
        name="the curve settled at another level",
        look_first="an undeclared change of data mixture, context length or schedule",
        protect="record; declare the change",
        confirm="the plan of data and schedule at that step",
        recover="none if it was meant; else the change",
    ),
    "gradient_spike": Symptom(
        name="gradient norm far above its usual range, loss unmoved",
        look_first="data: an odd batch; clipping hides it from the loss",
        protect="record, watch 50 more steps",
        confirm="recurrence; per-layer norms",
        recover="none unless it recurs",
    ),
    "creep": Symptom(
        name="a rise over many steps, no spike",
        look_first="after a resume: data order, RNG, precision, rate; else one growing layer",
        protect="check what the restore brought back",
        confirm="against the uninterrupted curve; per-layer norms",
        recover="fix the resume, or the layer",
    ),
    "vanishing_gradient": Symptom(
        name="gradients or updates at zero",
        look_first="residual path, dead units, frozen or unregistered parameters",
        protect="nothing is lost by waiting",
        confirm="per-layer update ratio",
        recover="fix the model or the optimizer's parameter groups",
    ),
    "layer_outlier": Symptom(
        name="one layer far from its own range",
        look_first="that layer: overflow, attention logits, normalisation",
        protect="keep the norms around it",
        confirm="which tensor; whether the total follows",
        recover="with the cause",
    ),
    "only_evaluation": Symptom(
        name="only in evaluation",
        look_first="evaluation data or code, a stale value",
        protect="nothing: training is not touched",
        confirm="evaluate the previous checkpoint again",
        recover="fix the evaluation",
    ),
    "all_ranks_at_once": Symptom(
        name="all ranks at once",
        look_first="communication",
        protect="keep evidence; the rank that reports is usually the victim",
        confirm="flight recorder; counters; all-reduce now against its quiet baseline",
        recover="the cable or NIC; other traffic",
    ),
    "follows_node": Symptom(
        name="follows a node over attempts",
        look_first="hardware",
        protect="isolate first; never train while looking",
        confirm="map ranks off it; ECC, Xid, canary, twin step",
        recover="burn-in",
    ),
    "silent_corruption": Symptom(
        name="replicas differ, or a clean replay",
        look_first="hardware that computes wrongly without an error",
        protect="quarantine suspects",
        confirm="twin step, canary, ECC",
        recover="rollback and replay",
    ),
    "no_progress": Symptom(
        name="no rank makes a step",
        look_first="the rank that never entered the collective the others wait on",
        protect="flight recorder and stacks before any kill",
        confirm="who is missing; node reachable?",
        recover="restart without the suspect",
    ),
    "slow": Symptom(
        name="steps slow down, loss unmoved",
        look_first="one slow rank, cooling, power cap, congestion",
        protect="record",
        confirm="compute time against peers of the same stage; clocks; counters",
        recover="service the node",
    ),
    "held_by_hand": Symptom(
        name="held by a person",
        look_first="the reason they gave",
        protect="as they asked",
        confirm="–",
        recover="resume in place",
    ),
    "unknown": Symptom(
        name="not one of the known symptoms",
        look_first="data, then numerics, then communication, then hardware",
        protect="stop and preserve",
        confirm="the first divergence from the last good step",
        recover="known-good state with the smallest change",
    ),
}
