"""What each kind of fact says for and against each failure family, and why.

Two weights: 2 where the fact by itself makes a family the first to look at (or hard to keep), 1 where
it only leans. Nothing here rules a family out: only a probe does (see `andon.diagnose.probes`).
"""

from andon.diagnose.families import Family

Says = tuple[Family, int, str]

DATA, NUMERICS, OPTIMIZER, STATE, NETWORK, HARDWARE, DRIFT = (
    Family.DATA,
    Family.NUMERICS,
    Family.OPTIMIZER,
    Family.DISTRIBUTED,
    Family.COMMUNICATION,
    Family.HARDWARE,
    Family.DRIFT,
)

_WHERE: dict[str, tuple[Says, ...]] = {
    "one_rank_first": (
        (DATA, 1, "its batch was its own"),
        (NUMERICS, 1, "an overflow on ordinary data looks the same"),
        (HARDWARE, 1, "its device was its own, too"),
        (NETWORK, -2, "it went bad before any exchange with other ranks"),
        (DRIFT, -1, "code and configuration are the same on every rank"),
    ),
    "many_ranks_first": (
        (NUMERICS, 1, "the same tensors overflowed everywhere"),
        (OPTIMIZER, 1, "the weights or moments before it were the same everywhere"),
        (DATA, -1, "not one shard: they read different samples"),
        (HARDWARE, -1, "not one device"),
    ),
    "rank_unknown": ((NUMERICS, 1, "nonfinite after the reduce; no rank-local value says where it began"),),
    "bad_input": (
        (DATA, 2, "the input was nonfinite before the model touched it"),
        (NUMERICS, -1, "no computation had begun"),
        (NETWORK, -2, "nothing had been exchanged"),
    ),
    "already_bad": ((STATE, 1, "what began bad may have been restored bad"),),
}

_FINDINGS: dict[str, tuple[Says, ...]] = {
    "loss_spike": (
        (DATA, 1, "most spikes come from a batch together with a state of the weights"),
        (OPTIMIZER, 1, "a learning rate that is too high spikes, too"),
    ),
    "recovered_spike": (
        (DATA, 1, "one odd batch passes"),
        (OPTIMIZER, -1, "an unstable rate does not recover by itself"),
    ),
    "grad_norm_creep": (
        (NUMERICS, 2, "one layer or the attention logits grow step by step"),
        (DATA, -1, "a bad batch comes at once"),
        (HARDWARE, -1, "a flipped bit comes at once"),
    ),
    "grad_norm_spike": ((DATA, 1, "an odd batch; clipping hides it from the loss"),),
    "grad_norm_sustained": (
        (DATA, 1, "a range of odd samples"),
        (OPTIMIZER, 1, "the rate does not fit this state"),
    ),
    "grad_norm_collapse": (
        (NUMERICS, 1, "dead units or a broken residual path"),
        (DRIFT, 1, "frozen or unregistered"),
    ),
    "layer_grad_norm_bad": ((NUMERICS, 1, "one layer is bad by itself"),),
    "layer_outlier": ((NUMERICS, 1, "one layer left its own range"),),
    "layer_dead": (
        (OPTIMIZER, 1, "its parameters are in no group of the optimizer"),
        (DRIFT, 1, "frozen by a change"),
    ),
    "level_shift": (
        (DRIFT, 1, "a change nobody declared"),
        (DATA, 1, "another mixture"),
        (OPTIMIZER, 1, "a schedule phase"),
    ),
    "grad_norm_level_shift": ((DRIFT, 1, "a change nobody declared"), (DATA, 1, "another mixture")),
    "nonfinite_state": ((OPTIMIZER, 1, "weights or moments are nonfinite"),),
    "nonfinite_skipped": ((NUMERICS, 1, "gradients overflowed and were skipped"),),
    "scaler_overflows": ((NUMERICS, 1, "the scale overflows more often than its search does"),),
    "scaler_at_floor": ((NUMERICS, 2, "even the smallest scale overflows"),),
    "scaler_not_restored": (
        (OPTIMIZER, 2, "the scale was searched again"),
        (STATE, 1, "other parts may be missing, too"),
    ),
    "checksum_differs": (
        (HARDWARE, 1, "a device computed or kept it wrongly"),
        (STATE, 1, "or the ranks diverged"),
    ),
    "replicas_differ": (
        (HARDWARE, 1, "a device computed or kept it wrongly"),
        (STATE, 1, "or the ranks diverged"),
    ),
    "corruption": (
        (HARDWARE, 1, "a device computed or kept it wrongly"),
        (STATE, 1, "or the ranks diverged"),
    ),
    "twin_differs": ((HARDWARE, 2, "one of two devices computed the same step differently"),),
    "restore_differs": ((STATE, 2, "what was loaded is not what was saved"),),
    "hang": ((NETWORK, 1, "a collective did not finish"),),
    "node_loss": ((HARDWARE, 2, "a node is gone"),),
    "congestion": ((NETWORK, 2, "collectives slowed on all ranks at once"), (HARDWARE, -1, "not one device")),
    "straggler": (
        (HARDWARE, 1, "one rank computes slower than its peers"),
        (NETWORK, -1, "its own waiting is short"),
    ),
    "throttling": (
        (HARDWARE, 2, "clocks fell at the limit of heat or power"),
        (NUMERICS, -1, "values are not touched by it"),
    ),
}

_LAUNCHES: dict[str, tuple[Says, ...]] = {
    "restart_just_before": (
        (STATE, 1, "what a restore breaks shows within steps"),
        (OPTIMIZER, 1, "scheduler, scaler or moments may be missing"),
    ),
    "no_restart_near": ((STATE, -1, "what a restore breaks shows sooner"),),
    "nothing_changed": ((DRIFT, -2, "code, configuration and environment are those of the attempt before"),),
    "long_unchanged": ((DRIFT, -1, "nothing was changed since that launch"),),
    "code_changed": ((DRIFT, 2, "other code than the attempt before"),),
    "config_changed": ((DRIFT, 1, "another configuration"), (OPTIMIZER, 1, "the schedule may be part of it")),
    "environment_changed": ((DRIFT, 1, "another image, driver or library"),),
    "nccl_changed": ((NETWORK, 1, "another NCCL"), (DRIFT, 1, "another library")),
    "scale_changed": (
        (OPTIMIZER, 1, "the learning rate belongs to the batch"),
        (STATE, 1, "state was laid out anew"),
    ),
    "precision_changed": ((NUMERICS, 2, "another range of numbers"), (DRIFT, 1, "another regime")),
    "boundary_near": (
        (OPTIMIZER, 1, "the schedule changed there"),
        (DATA, 1, "mixture or length may change with it"),
    ),
}

_CURVES: dict[str, tuple[Says, ...]] = {
    "norm_crept": (
        (NUMERICS, 2, "growth over steps is an overflow on its way"),
        (HARDWARE, -1, "a flipped bit comes at once"),
    ),
    "norm_steady": (
        (NUMERICS, -1, "what overflows slowly shows before"),
        (DATA, 1, "it came at once, as a sample does"),
    ),
    "norm_led_loss": ((NUMERICS, 1, "the gradient left its range before the loss did"),),
    "lr_jumped": ((OPTIMIZER, 2, "a jump of the rate explains trouble at that step"),),
    "lr_smooth": ((OPTIMIZER, -1, "the rate did not jump"),),
    "scale_fell": ((NUMERICS, 2, "gradients overflowed before it"),),
}

_DATA: dict[str, tuple[Says, ...]] = {
    "batch_overlong": (
        (DATA, 2, "an overlong sample overflows by its length"),
        (NUMERICS, 1, "range grows with length"),
    ),
    "batch_masked_out": ((DATA, 2, "a sample without a target has no loss to average"),),
    "batch_duplicate": ((DATA, 1, "samples that were read before"),),
    "batch_ordinary": ((DATA, -1, "it looks like the others, which does not clear it"),),
}

_HARDWARE: dict[str, tuple[Says, ...]] = {
    "device_fault_here": ((HARDWARE, 2, "a device of a first-bad node failed by itself"),),
    "device_fault_somewhere": (
        (HARDWARE, 2, "a device failed by itself; which rank was first is not known"),
    ),
    "link_fault_somewhere": (
        (HARDWARE, 2, "a link failed by itself; which rank was first is not known"),
        (NETWORK, 1, "exchanges run over it"),
    ),
    "device_fault_elsewhere": ((HARDWARE, 1, "not on a node that went bad first"),),
    "link_fault_here": ((HARDWARE, 2, "its link failed by itself"), (NETWORK, 1, "exchanges run over it")),
    "link_fault_elsewhere": (
        (NETWORK, 1, "exchanges run over it"),
        (HARDWARE, 1, "not on a node that went bad first"),
    ),
    "application_fault": (
        (DRIFT, 1, "the program did it, not the device"),
        (HARDWARE, -1, "the device only reports it"),
    ),
    "corrected": ((HARDWARE, -1, "it was corrected: no value was damaged"),),
    "throttled": ((HARDWARE, 1, "heat or power slows a device"),),
    "preflight_failed": ((HARDWARE, 2, "the node failed its own check"),),
    "preflight_passed": ((HARDWARE, -1, "intermittent faults pass, too"),),
    "killed_from_outside": (
        (HARDWARE, 1, "its host ended it: memory, or somebody"),
        (NETWORK, -1, "the others are victims"),
    ),
    "device_error": ((HARDWARE, 2, "a device or its driver failed under the program"),),
    "out_of_memory": ((DRIFT, 1, "a change of size or layout"), (DATA, 1, "a longer batch")),
}

_COLLECTIVES: dict[str, tuple[Says, ...]] = {
    "rank_never_entered": (
        (HARDWARE, 1, "a rank that does not enter is dead, slow or stuck"),
        (DRIFT, 1, "or its program took another branch"),
        (NETWORK, -2, "those who report only wait"),
    ),
    "all_entered": (
        (NETWORK, 2, "every rank entered and the collective did not end"),
        (HARDWARE, -1, "no rank is missing"),
    ),
    "collective_mismatch": (
        (STATE, 2, "ranks disagree about what they exchange"),
        (NETWORK, -2, "both sides entered"),
        (HARDWARE, -1, "no rank is missing"),
    ),
    "fabric_error": ((NETWORK, 2, "packets were lost on that path"),),
}

_CHECKS: dict[str, tuple[Says, ...]] = {
    "replicas_equal": ((STATE, -1, "replicas agree"), (HARDWARE, -1, "replicas agree")),
    "twin_equal": ((HARDWARE, -1, "two devices computed the same"),),
    "restore_equal": ((STATE, -2, "every part was loaded as it was saved"),),
    "checkpoint_sound": ((OPTIMIZER, -1, "weights and moments were finite and in their range there"),),
    "checkpoint_bad": ((OPTIMIZER, 1, "the state was bad before it"), (STATE, 1, "or it was saved wrongly")),
}

_RECURRENCE: dict[str, tuple[Says, ...]] = {
    "same_data": (
        (DATA, 2, "the same data broke it again"),
        (HARDWARE, -1, "chance does not strike one batch twice"),
    ),
    "same_step": (
        (DATA, 1, "the same data, or what is bound to this step"),
        (DRIFT, 1, "software may be bound to this step"),
        (HARDWARE, -1, "chance does not strike one step twice"),
    ),
    "other_step": (
        (OPTIMIZER, 2, "it came back although that data was skipped"),
        (DATA, -1, "other data broke it"),
    ),
    "other_nodes": ((HARDWARE, -2, "it came back without the suspects"), (DATA, 1, "the data came with it")),
    "same_node": ((HARDWARE, 2, "it follows a node"), (DATA, -1, "other data, same node")),
    "node_again": ((HARDWARE, 1, "an earlier incident began on the same node"),),
}

MEANING: dict[str, tuple[Says, ...]] = (
    _WHERE | _FINDINGS | _LAUNCHES | _CURVES | _DATA | _HARDWARE | _COLLECTIVES | _CHECKS | _RECURRENCE
)
