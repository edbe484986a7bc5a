"""No habit trains other numbers than plain PyTorch without a line; most are right.

`make proof PART=habits` measures every cell (`tests/proof/habit_matrix.py`); here are some cheap ones.
"""

from __future__ import annotations

import pytest

from habits.habit_sides import SETTINGS
from habits.habit_table import LAYOUTS, outcome, table
from proof_rows import chosen

FEW = 400


def test_the_table_has_habits_of_every_kind() -> None:
    assert len(table()) >= FEW
    assert {one.kind for one in table().values()} == {
        *("losses", "gradients", "optimizer", "weights", "models", "loops")
    }
    assert len(LAYOUTS) == 6


CELLS = [
    # act, layout, outcome, a part of its line
    ("weights_replaced_by_data", "fsdp", "right", ""),
    ("noise_that_differs_by_rank_on_weights", "pp", "named", "a tensor that is another one on"),
    ("squares_of_weights_read_for_a_log", "tp", "named", "sum of a weight that is split over"),
    ("rows_normalised_on_whole_weights", "tp", "right", ""),
    ("momentum_zeroed_by_weight", "zero2", "right", ""),
    ("norms_of_all_weights_read_for_a_log", "pp", "named", "is on stage 1 of the pipeline"),
    ("clip_by_norm_in_written_out_passes", "zero2", "right", ""),
    ("clip_by_norm_in_written_out_passes", "tp", "right", ""),
    ("clip_by_the_run_after_forward_backward", "pp", "right", ""),
    ("clip_in_a_step_pre_hook", "fsdp", "right", ""),
    ("noise_that_differs_by_rank", "ddp", "named", "by different numbers before run.update"),
    ("norms_by_parameter_name", "tp", "named", "the number is that of this rank's part"),
    ("norm_of_one_weight_read_for_a_log", "zero2", "named", "a gradient reads as zeros"),
    ("weight_times_a_mean", "pp", "named", "rank 1: loss: the first of (sum, count) is a mean"),
    ("a_temperature_learned_in_the_loss", "ddp", "named", "it depends on 1 tensor of shape []"),
    ("one_dict_whose_keys_are_parameters_of_forward", "ddp", "right", ""),
    ("a_model_of_transformers_with_labels", "ddp", "right", ""),
    ("written_out_passes", "zero2", "right", ""),
    ("optimizer_made_anew_in_a_local_name", "ddp", "named", "SGD: made over weights of a run"),
    ("class_weights_that_differ_by_rank", "ddp", "named", "loss: weight [3] that it uses is anoth"),
    ("rows_of_a_split_weight_normalised", "tp", "named", "each rank has a part of it"),
    ("layers_tied_after_the_start", "fsdp", "named", "was replaced since shoal.parallelize"),
    ("optimizer_rebuilt_in_the_middle", "zero2", "named", "run.optimizer was set to another"),
    ("clip_by_the_largest_element", "zero2", "right", ""),
    ("clip_by_value_in_written_out_passes", "fsdp", "right", ""),
    ("clip_between_forward_backward_and_update", "tp", "right", ""),
    ("norm_read_for_a_log", "tp", "right", ""),
    ("a_distributed_sampler_with_a_seed_by_rank", "zero2", "named", "has seed = 0 on rank 0 and 1"),
    ("a_dataset_that_numbers_its_classes_by_a_set", "ddp", "named", "ranks number classes"),
    ("a_table_of_class_numbers_in_the_loss", "ddp", "named", "numbers of 3 names that it uses"),
    ("a_split_drawn_by_each_rank", "ddp", "named", "run.evaluate: the dataset of rank 1 holds"),
    ("batch_norm_without_a_given_micro_batch", "ddp", "named", "on each of 2 ranks its own"),
    ("a_running_mean_of_inputs", "tp", "named", "so 4 times in a step"),
    ("gradients_of_the_inputs_of_every_block", "pp", "right", ""),
    ("converted_batch_norms", "fsdp", "right", ""),
    ("batch_norm", "ddp", "named", "a normalisation layer got a micro-batch of one value"),
    ("arrays_that_cannot_be_written", "ddp", "right", ""),
    ("a_masked_mean_wrapped_as_a_mean_of_samples", "ddp", "named", "depends on the others"),
    ("a_model_of_transformers_with_labels", "tp", "right", ""),
    ("a_model_of_transformers_with_labels", "pp", "right", ""),
    ("one_row_set_to_zero", "fsdp", "right", ""),
    ("columns_scaled_through_an_index", "fsdp", "right", ""),
    ("a_row_scaled_through_an_index", "fsdp", "named", "on rows of a weight"),
    ("all_layers_drawn_anew_with_a_seed", "fsdp", "right", ""),
    ("seeded_noise_on_gradients", "fsdp", "right", ""),
    ("noise_that_differs_by_rank", "fsdp", "named", "by different numbers before run.update"),
    ("weights_averaged_as_one_vector", "fsdp", "right", ""),
    ("a_penalty_on_weights_in_a_written_out_pass", "fsdp", "named", "a rank holds parts of"),
    ("a_penalty_on_weights_in_a_written_out_pass", "tp", "named", "a rank holds parts of weights"),
    ("total_norm_of_weights_in_written_out_passes", "zero2", "right", ""),
    ("squares_of_gradients_read_for_a_log", "tp", "named", "the number is that of this rank's"),
    ("noise_that_differs_by_rank_on_weights", "tp", "named", "a tensor that is another one on"),
    ("weights_scaled_in_place", "pp", "right", ""),
    ("weights_scaled_by_data", "zero2", "right", ""),
    ("whole_weights_changed_unlike_by_rank", "ddp", "named", "otherwise than on rank 0"),
    ("a_state_dict_loaded_into_whole_weights", "fsdp", "right", ""),
    ("all_layers_drawn_anew_on_whole_weights", "pp", "right", ""),
    ("gradients_read_after_the_update", "zero2", "named", "a gradient reads as zeros"),
    ("state_read_for_a_log", "fsdp", "right", ""),
    ("state_read_for_a_log", "zero2", "named", "this rank has a part of it"),
    ("a_model_compiled_in_the_loop", "fsdp", "right", ""),
    ("mean_in_a_written_out_pass", "ddp", "named", "2 × a mean and comes with a count of 2"),
    ("mean_times_the_rows_in_a_written_out_pass", "ddp", "right", ""),
    ("a_mean_without_a_count_in_a_written_out_pass", "ddp", "named", "comes without a count"),
    ("parameters_counted_for_a_log", "tp", "right", ""),
    ("weights_pulled_towards_the_start", "tp", "right", ""),
    ("seeded_noise_in_the_shape_of_all_gradients", "tp", "right", ""),
    ("all_layers_drawn_anew_with_a_seed", "tp", "right", ""),
    ("adagrad_whose_state_is_made_with_it", "tp", "right", ""),
    ("cosines_to_the_start_read_for_a_log", "tp", "named", "cosine_similarity of a weight"),
    ("a_target_network_that_follows_slowly", "tp", "named", "add_ of layers.0.up.weight: this"),
    ("an_average_by_averaged_model", "tp", "named", "copy.deepcopy of Chain: under tp"),
    (
        "activations_by_a_hook_in_the_loss",
        "tp",
        "named",
        "a tensor that the model computed in an e",
    ),
    ("a_hook_on_all_modules", "tp", "named", "a forward hook on all modules"),
    ("a_frozen_trunk", "pp", "right", ""),
    ("lookahead_by_hand", "pp", "right", ""),
    ("seeded_noise_like_each_weight", "pp", "right", ""),
    ("batches_moved_to_the_device_of_the_first_parameter", "pp", "right", ""),
    ("pseudo_labels_by_the_model", "pp", "named", "this rank has the blocks of one stage"),
    ("a_norm_by_a_hook_on_a_weight", "pp", "named", "model: 1 weight with a gradient hook"),
    ("weights_averaged_by_hand", "pp", "named", "torch.distributed.all_reduce of a weight"),
    ("a_target_network_that_follows_slowly", "fsdp", "right", ""),
    ("clip_by_hand_over_all_weights", "fsdp", "right", ""),
    ("gradients_reduced_by_hand", "fsdp", "named", "torch.distributed.all_reduce of a weight"),
    ("gradients_of_weights_between_steps", "fsdp", "named", "torch.autograd.grad by weights"),
    ("blocks_trained_in_turns", "fsdp", "named", "got no gradient in 4 steps"),
    ("a_clamp_by_a_hook_after_accumulation", "zero2", "named", "has a gradient hook"),
    ("an_optimizer_in_a_copy", "zero2", "named", "optimizer.state_dict(): under zero2"),
    ("inputs_centred_over_the_batch", "ddp", "named", "depend on the other samples of the micro"),
    ("a_count_of_forward_passes", "ddp", "named", "each forward pass changes passes"),
    ("a_momentum_encoder_that_follows_in_forward", "ddp", "named", "own forward pass writes it"),
    ("a_penalty_on_gradients_of_weights", "ddp", "named", "gradient is that of one micro-batch"),
    ("a_step_inside_of_micro_batches", "ddp", "named", "run.step was called inside of the loop"),
    ("a_traced_model", "ddp", "named", "of torch.jit, which no layout can look into"),
    ("clip_by_hand_with_stacked_norms", "tp_fsdp", "right", ""),
    ("a_factor_that_differs_by_rank", "fsdp", "named", "by different numbers before run.update"),
    (
        "a_factor_that_differs_by_rank_after_forward_backward",
        "pp",
        "named",
        "a tensor that is another one on rank 1",
    ),
    ("per_sample_norms_by_vmap", "tp", "named", "inside of torch.func"),
    ("per_sample_norms_by_vmap", "fsdp", "named", "inside of torch.func"),
    ("gradients_reduced_by_hand", "zero2", "named", "torch.distributed.allreduce of a weight"),
    ("weights_that_share_memory_by_data", "zero2", "named", "two weights in one memory"),
    ("weights_that_share_memory_by_data", "ddp", "right", ""),
    ("a_gan_of_two_runs", "fsdp", "right", ""),
    ("nodes_of_a_graph_and_their_adjacency", "pp", "right", ""),
    ("gradients_clamped_by_a_function", "fsdp", "named", "its backward pass is not linear"),
    ("gradients_clamped_by_a_module_hook", "pp", "named", "1 module with a backward hook"),
    ("a_normaliser_averaged_over_ranks", "ddp", "named", "times the number of ranks"),
    ("contrastive_in_a_written_out_pass", "zero2", "named", "depends on the others beside it"),
    ("noise_by_a_generator_of_the_model", "ddp", "named", "a generator of its own"),
    ("an_optimizer_that_wraps_another", "ddp", "named", "made without Optimizer.__init__"),
    ("noise_that_differs_by_rank_on_weights", "cp", "named", "changed beside the run, or by"),
    ("a_running_statistic_of_instance_norm", "tp", "named", "so 4 times in a step"),
    ("a_fresh_table_in_each_step", "tp", "right", ""),
    ("an_adjacency_beside_as_many_samples", "tp", "right", ""),
    ("a_classifier_by_cosines", "pp", "right", ""),
    ("parts_of_a_module_dict_called_in_the_loop", "fsdp", "named", "has no forward() of its own"),
    ("nodes_of_a_graph_and_their_adjacency", "tp", "right", ""),
    ("a_gan_of_two_runs", "zero2", "right", ""),
    ("weights_that_share_memory_by_data", "fsdp", "named", "two weights in one memory"),
    ("a_mean_over_all_ranks_times_their_number", "ddp", "named", "times the number of ranks"),
    ("gradients_clamped_by_a_function", "ddp", "named", "its backward pass is not linear"),
    ("one_module_under_two_names", "tp", "right", ""),
    ("nodes_of_a_graph_in_micro_batches", "tp", "named", "the model takes all samples"),
    ("a_checkpoint_of_ones_own_resumed", "zero2", "named", "optimizer.state_dict(): under zero2"),
    ("inputs_changed_in_place_by_the_model", "fsdp", "right", ""),
    ("inputs_scaled_if_one_is_large", "ddp", "named", "depend on the other samples of the micro"),
    ("boxes_with_the_number_of_their_image", "ddp", "named", "places of samples in the batch"),
    ("a_nested_tensor_as_the_batch", "tp", "named", "a nested tensor (torch.nested)"),
    ("codes_of_samples_in_the_batch", "ddp", "named", "has a graph behind it"),
    ("a_projector_beside_the_model", "zero2", "named", "are no parameters of the run"),
    ("the_mean_of_a_model_in_a_written_out_pass", "ddp", "named", "an element weighs"),
    ("the_loss_reduced_before_its_backward", "ddp", "named", "was summed over ranks in place"),
    ("an_optimizer_that_deals_weights_to_ranks", "zero2", "named", "would mix parts of weights"),
    ("rows_moved_by_index_add", "fsdp", "right", ""),
    ("weights_taken_out_of_a_group", "fsdp", "named", "a choice by weight chooses nothing"),
    ("a_number_set_on_each_block", "tp", "named", "was changed since shoal.parallelize"),
    ("forces_by_autograd_in_forward", "fsdp", "named", "the forward pass runs a backward pass"),
    ("one_element_moved_through_a_view", "tp", "named", "this rank has a part of it"),
    ("pairs_of_numbers_read_as_complex_ones", "zero2", "named", "here at an odd place"),
    ("pairs_of_numbers_read_as_complex_ones", "pp", "right", ""),
    ("a_forward_patched_in_the_middle", "pp", "named", "was set since shoal.parallelize"),
    ("advantages_normalised_in_a_written_out_pass", "cp", "named", "depends on the others"),
    ("the_loss_reduced_before_its_backward", "cp", "named", "was summed over ranks in place"),
]
ADDED = 69
"""The last rows: each holds a guard that no other test does."""
SHORT = [
    *(cell[:2] for cell in (*CELLS[:20], *CELLS[-ADDED:])),
    ("batch_norm", "ddp"),
    ("a_split_drawn_by_each_rank", "ddp"),
]


@pytest.mark.parametrize(("name", "layout", "verdict", "part"), chosen(CELLS, SHORT))
def test_a_habit_is_right_or_named(worlds, name: str, layout: str, verdict: str, part: str) -> None:
    answers = worlds(SETTINGS[layout].ranks).call(
        "habits.habit_table:attempt", name=name, layout=layout
    )
    found, shown = outcome(answers)
    assert found == verdict, shown
    assert part in shown
