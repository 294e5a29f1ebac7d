// Makes elements as others are by changing only what differs, so that focus, selection and what is open stay.

/** Change `now` (an element of the page) into `next`. Elements with an id are the same if their ids are. */
export function morph(now, next) {
  if (now.isEqualNode(next)) return;
  if (now.nodeType !== next.nodeType || now.nodeName !== next.nodeName || (now.id ?? "") !== (next.id ?? "")) {
    now.replaceWith(next);
  } else if (now.nodeType === Node.ELEMENT_NODE) {
    morphAttributes(now, next);
    morphChildren(now, next);
  } else {
    now.data = next.data;
  }
}

function morphAttributes(now, next) {
  const stays = (name) => name === "open" && now.nodeName === "DETAILS"; // the reader opened it
  for (const { name } of [...now.attributes]) if (!next.hasAttribute(name) && !stays(name)) now.removeAttribute(name);
  for (const { name, value } of next.attributes) if (now.getAttribute(name) !== value) now.setAttribute(name, value);
}

function morphChildren(now, next) {
  const wanted = new Set([...next.children].map((child) => child.id).filter(Boolean));
  let place = now.firstChild;
  for (const child of [...next.childNodes]) {
    const known = child.id ? [...now.children].find((each) => each.id === child.id) : null;
    if (known) {
      place = removeUntil(place, (each) => each === known || wanted.has(each.id));
      if (known === place) place = known.nextSibling;
      else now.insertBefore(known, place); // which takes the focus from it
      morph(known, child);
    } else if (place && !child.id && !place.id) {
      const following = place.nextSibling;
      morph(place, child);
      place = following;
    } else {
      now.insertBefore(child, place);
    }
  }
  removeUntil(place, () => false);
}

/** Remove nodes, from one on; the first that is to stay. */
function removeUntil(place, stays) {
  while (place && !stays(place)) {
    const following = place.nextSibling;
    place.remove();
    place = following;
  }
  return place;
}
