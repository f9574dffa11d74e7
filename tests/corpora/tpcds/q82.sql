-- Items in stock that sell in stores.
select i_item_id, i_item_desc, i_current_price
from item
join inventory on inv_item_sk = i_item_sk
join date_dim on d_date_sk = inv_date_sk
join store_sales on ss_item_sk = i_item_sk
where i_current_price between 62 and 62 + 30
  and d_date between date '2000-05-25' and date '2000-05-25' + interval 60 days
  and i_manufact_id in (129, 270, 821, 423)
  and inv_quantity_on_hand between 100 and 500
group by i_item_id, i_item_desc, i_current_price
order by i_item_id, i_item_desc, i_current_price
limit 100
