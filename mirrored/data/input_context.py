"""Arguments of functions that build a tower's own input pipeline, or its own value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputContext:
    """The argument of the function of ``distribute_datasets_from_function``, which is called once on each tower.

    Attributes:
        num_input_pipelines: the number of pipelines, one per tower.
        input_pipeline_id: this pipeline's index.
        num_replicas_in_sync: the number of towers that train together.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of each tower.

        Raises:
            ValueError: ``global_batch_size`` is not divisible by the number of towers.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"the global batch size {global_batch_size} is not divisible by the {self.num_replicas_in_sync} "
                "towers; use distribute_dataset, which supports uneven shares"
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """The argument of the function of ``distribute_values_from_function``, which is called once on each tower."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int
