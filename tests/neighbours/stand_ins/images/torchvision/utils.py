"""Images that nobody looks at."""


def save_image(*_args, **_named):
    pass
