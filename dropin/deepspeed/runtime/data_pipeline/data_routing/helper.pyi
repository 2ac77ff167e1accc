from shardwise.data import convert_to_random_ltd as convert_to_random_ltd
from shardwise.data import remove_random_ltd_state_dict as remove_random_ltd_state_dict
from shardwise.data import save_without_random_ltd as save_without_random_ltd

__all__ = ["convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"]
