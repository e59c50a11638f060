"""Classifiers of scikit-learn, and XGBoost, with the hyperparameters of the DP-MERF evaluation.

They see flattened pixels, 0 for black and 1 for white, and hard labels. What had to be replaced is
in docs/evaluation.md.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.errors import InvalidSettings, installing


@dataclass(frozen=True)
class Classical:
    """Where a classifier is found, and what it is built with."""

    home: str
    settings: dict[str, Any] = field(default_factory=dict)
    is_random: bool = True
    """Whether a seed changes the outcome; one that none changes is trained once."""


CLASSICAL = {
    "logreg": Classical(
        "sklearn.linear_model:LogisticRegression",
        {"solver": "lbfgs", "max_iter": 5000},
        is_random=False,
    ),
    "random-forest": Classical(
        "sklearn.ensemble:RandomForestClassifier",
        {"n_estimators": 100, "class_weight": "balanced"},
    ),
    "gaussian-nb": Classical("sklearn.naive_bayes:GaussianNB", is_random=False),
    "bernoulli-nb": Classical(
        "sklearn.naive_bayes:BernoulliNB", {"binarize": 0.5}, is_random=False
    ),
    "linear-svc": Classical(
        "sklearn.svm:LinearSVC", {"max_iter": 10_000, "tol": 1e-8, "loss": "hinge"}
    ),
    "decision-tree": Classical(
        "sklearn.tree:DecisionTreeClassifier", {"class_weight": "balanced", "criterion": "gini"}
    ),
    "lda": Classical(
        "sklearn.discriminant_analysis:LinearDiscriminantAnalysis",
        {"solver": "eigen", "tol": 1e-8, "shrinkage": 0.5},
        is_random=False,
    ),
    "adaboost": Classical("sklearn.ensemble:AdaBoostClassifier", {"n_estimators": 100}),
    "sklearn-mlp": Classical("sklearn.neural_network:MLPClassifier"),
    "bagging": Classical(
        "sklearn.ensemble:BaggingClassifier", {"max_samples": 0.1, "n_estimators": 20}
    ),
    "gradient-boosting": Classical(
        "sklearn.ensemble:GradientBoostingClassifier", {"subsample": 0.1, "n_estimators": 50}
    ),
    "xgboost": Classical(  # which takes multi:softprob by itself where there are several classes
        "xgboost:XGBClassifier", {"colsample_bytree": 0.1, "n_estimators": 50}
    ),
}


def is_installed(name: str) -> bool:
    """Say whether the library of a model is there: XGBoost is an extra."""
    library = CLASSICAL[name].home.partition(":")[0].partition(".")[0]
    return importlib.util.find_spec(library) is not None


def predictions(
    name: str,
    images: NDArray[np.float32],
    labels: NDArray[np.int64],
    test: NDArray[np.float32],
    *,
    seed: int,
) -> NDArray[np.int64]:
    """Fit the classifier called `name` on `images` and return the labels that it gives to `test`.

    A class of which there are no images is never predicted.
    """
    if not is_installed(name):
        raise InvalidSettings(
            f"{name} is not installed; {installing(name)}, or leave it out of --models"
        )
    present, numbered = np.unique(labels, return_inverse=True)  # XGBoost wants classes without gaps
    if len(present) < 2:
        raise InvalidSettings(
            f"{name} cannot be trained on images of {len(present)} class; expected at least 2"
        )
    described = CLASSICAL[name]
    module, _, attribute = described.home.partition(":")
    settings = described.settings | ({"random_state": seed} if described.is_random else {})
    model = getattr(import_module(module), attribute)(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as: the number of iterations of the paper is reached
        model.fit(images.reshape(len(images), -1), numbered)
    found: NDArray[np.int64] = present[np.asarray(model.predict(test.reshape(len(test), -1)))]
    return found
