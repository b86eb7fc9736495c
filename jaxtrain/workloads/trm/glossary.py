"""The meanings of this workload's metrics."""

from jaxtrain.telemetry.glossary import Entry

GLOSSARY = (
    Entry("lm_loss", "lm_loss", "cross-entropy of the cells of a board"),
    Entry(
        "q_halt_loss, q_continue_loss",
        "q_(halt|continue)_loss",
        "loss of the heads that decide when to stop; half of it is in the loss",
    ),
    Entry("accuracy", "accuracy", "share of cells that are right"),
    Entry("exact_accuracy", "exact_accuracy", "share of boards that are solved"),
    Entry(
        "exact_accuracy_difficulty_N",
        r"exact_accuracy_difficulty_(?P<N>\d+)",
        "share that is solved of boards in difficulty class N, from easy to hard",
        less_is_better=False,
    ),
    Entry(
        "exact_accuracy_checked",
        "exact_accuracy_checked",
        "share that is solved if the rules choose among the rollouts",
        less_is_better=False,
    ),
    Entry(
        "rollouts_halted",
        "rollouts_halted",
        "share of the rollouts but the first of which the halting head was sure",
    ),
    Entry("test_steps", "test_steps", "supervision steps of an evaluation's boards"),
    Entry(
        "q_halt_accuracy",
        "q_halt_accuracy",
        "share of boards of which the halting head knows whether they are solved",
    ),
    Entry("steps", "steps", "supervision steps of boards that were finished"),
    Entry("halted", "halted", "share of boards that were finished in this step"),
)
