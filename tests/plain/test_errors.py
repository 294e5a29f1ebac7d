import ast
import inspect

from coserve import errors


def test_the_tree_drawn_in_the_docstring_is_the_tree_of_classes():
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    drawn = [word for word in (errors.__doc__ or "").split() if word.endswith("Error")]
    assert sorted(drawn) == sorted(cls.__name__ for cls in classes)
    assert all(issubclass(cls, errors.CoserveError) for cls in classes)


def test_every_error_says_what_it_is_for():
    tree = ast.parse(inspect.getsource(errors))
    assert all(ast.get_docstring(node) for node in tree.body if isinstance(node, ast.ClassDef))
