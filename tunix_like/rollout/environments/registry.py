"""Temporary."""


def resolve(name):
    from tunix_like.runtime.user_code import load_function

    return load_function(name, "Environment")
